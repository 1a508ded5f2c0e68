//! The supported quantized checkpoints: FP8 weights with a scale for each row, each matrix or each block of 128 by
//! 128, as three tools publish them.
//!
//! The config names the format of a checkpoint; the files have the type of each tensor. The config also says
//! whether the checkpoint was made for activations in FP8.

use serde_json::{Value, json};

/// The rows and columns that share a scale, in checkpoints with block scales.
const BLOCK: [usize; 2] = [kernels::cpu::FP8_BLOCK; 2];

/// The format of the input of products with FP8 matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActivationFormat {
    /// Numbers are not rounded.
    Full,
    /// Numbers are rounded to FP8: each 128 numbers of a row with a scale, which is a power of two.
    Fp8,
}

impl ActivationFormat {
    /// Adds the format to a description of the weights, for the fingerprint. Full activations add nothing, as in the
    /// fingerprints of older versions.
    pub fn added_to(self, weights: String) -> String {
        match self {
            Self::Full => weights,
            Self::Fp8 => format!("{weights}, activations in fp8 by 128"),
        }
    }
}

/// Rejects quantization settings that are not implemented, with their names. Returns the format of activations
/// that the checkpoint was made for.
pub fn activations(config: &Value) -> Result<ActivationFormat, String> {
    match config.get("quant_method").and_then(Value::as_str) {
        Some("compressed-tensors") => of_compressed_tensors(config),
        Some("fbgemm_fp8") => Ok(ActivationFormat::Fp8),
        Some("fp8") => of_blocks(config),
        Some(method) => Err(format!(
            "quantization_config: quant_method {method:?} is not implemented: compressed-tensors, fbgemm_fp8 and fp8 \
             are, with FP8 weights; or load the original and quantize it here"
        )),
        None => Err("quantization_config names no quant_method".to_owned()),
    }
}

/// Returns whether all weights have a scale for each block.
pub fn has_block_scales(config: &Value) -> bool {
    config.get("quant_method").is_some_and(|method| method == "fp8")
}

/// Returns whether each layer has fixed scales for its keys and values.
pub fn has_kv_scales(config: &Value) -> Result<bool, String> {
    let Some(scheme) = config.get("kv_cache_scheme").filter(|scheme| !scheme.is_null()) else {
        return Ok(false);
    };
    let in_scheme = |problem: String| problem.replacen(": ", ": kv_cache_scheme: ", 1);
    expect(scheme, "type", &["float"]).map_err(in_scheme)?;
    expect(scheme, "strategy", &["tensor", "attn_head"]).map_err(in_scheme)?;
    if scheme.get("num_bits").and_then(Value::as_u64) != Some(8) {
        return Err(in_scheme(refusal("num_bits", scheme.get("num_bits"), &["8"])));
    }
    for (key, wanted) in [("dynamic", false), ("symmetric", true)] {
        if scheme.get(key).and_then(Value::as_bool).is_some_and(|value| value != wanted) {
            return Err(in_scheme(refusal(key, scheme.get(key), &[&wanted.to_string()])));
        }
    }
    Ok(true)
}

/// Checks the config of a checkpoint in the form of DeepSeek and Qwen, whose weights all have block scales.
fn of_blocks(config: &Value) -> Result<ActivationFormat, String> {
    let is_set = |key: &str| config.get(key).is_some_and(|value| !value.is_null());
    expect_block(config, "weight_block_size")?;
    if is_set("activation_scheme") {
        expect(config, "activation_scheme", &["dynamic"])?;
    }
    if is_set("fmt") {
        expect(config, "fmt", &["e4m3"])?;
    }
    // The scales of activations are powers of two in any case.
    if is_set("scale_fmt") {
        expect(config, "scale_fmt", &["ue8m0"])?;
    }
    Ok(ActivationFormat::Fp8)
}

fn of_compressed_tensors(config: &Value) -> Result<ActivationFormat, String> {
    expect(config, "format", &["float-quantized"])?;
    if config.get("sparsity_config").is_some_and(|sparsity| !is_dense(sparsity)) {
        return Err("quantization_config: sparsity_config is not implemented".to_owned());
    }
    // They rotate weights and activations. Rotating only one of the two changes the results.
    if config.get("transform_config").is_some_and(|transforms| !is_empty(transforms)) {
        return Err("quantization_config: transform_config is not implemented".to_owned());
    }
    let groups = config.get("config_groups").and_then(Value::as_object).filter(|groups| !groups.is_empty());
    let groups = groups.ok_or("quantization_config: config_groups names none")?;
    let formats: Vec<ActivationFormat> = groups.values().map(of_group).collect::<Result<_, _>>()?;
    match formats.iter().all(|format| *format == formats[0]) {
        true => Ok(formats[0]),
        false => {
            Err("quantization_config: config_groups with and without input_activations are not implemented"
                .to_owned())
        }
    }
}

fn is_dense(sparsity: &Value) -> bool {
    is_empty(sparsity) || sparsity.get("format").and_then(Value::as_str) == Some("dense")
}

/// Returns whether settings are null, or an object in which all settings are so.
fn is_empty(settings: &Value) -> bool {
    settings.is_null() || settings.as_object().is_some_and(|settings| settings.values().all(is_empty))
}

/// Checks a group and returns its format of activations.
fn of_group(group: &Value) -> Result<ActivationFormat, String> {
    let weights = group.get("weights").filter(|weights| weights.is_object());
    let weights = weights.ok_or("quantization_config: a group of config_groups has no weights")?;
    expect(weights, "type", &["float"])?;
    expect(weights, "strategy", &["channel", "tensor", "block"])?;
    if weights.get("strategy").and_then(Value::as_str) == Some("block") {
        expect_block(weights, "block_structure")?;
    }
    if weights.get("num_bits").and_then(Value::as_u64) != Some(8) {
        return Err(refusal("num_bits", weights.get("num_bits"), &["8"]));
    }
    if weights.get("symmetric").and_then(Value::as_bool) == Some(false) {
        return Err("quantization_config: asymmetric weights are not implemented".to_owned());
    }
    if group.get("output_activations").is_some_and(|outputs| !outputs.is_null()) {
        return Err("quantization_config: output_activations are not implemented".to_owned());
    }
    let Some(inputs) = group.get("input_activations").filter(|inputs| !inputs.is_null()) else {
        return Ok(ActivationFormat::Full);
    };
    if inputs.get("dynamic").and_then(Value::as_bool) != Some(true) {
        return Err(
            "quantization_config: input_activations with static scales are not implemented: dynamic ones are"
                .to_owned(),
        );
    }
    expect(inputs, "type", &["float"])?;
    if inputs.get("num_bits").and_then(Value::as_u64) != Some(8) {
        return Err(refusal("num_bits of input_activations", inputs.get("num_bits"), &["8"]));
    }
    Ok(ActivationFormat::Fp8)
}

fn expect_block(object: &Value, key: &str) -> Result<(), String> {
    match object.get(key) {
        Some(value) if *value == json!(BLOCK) => Ok(()),
        found => Err(refusal(key, found, &[&json!(BLOCK).to_string()])),
    }
}

fn expect(object: &Value, key: &str, known: &[&str]) -> Result<(), String> {
    let found = object.get(key);
    match found.and_then(Value::as_str) {
        Some(value) if known.contains(&value) => Ok(()),
        _ => Err(refusal(key, found, known)),
    }
}

fn refusal(key: &str, found: Option<&Value>, known: &[&str]) -> String {
    let found = found.unwrap_or(&Value::Null);
    format!("quantization_config: {key} {found} is not implemented: {} is", known.join(" or "))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn channels() -> Value {
        json!({
            "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
            "kv_cache_scheme": null, "quantization_status": "compressed",
            "config_groups": {"group_0": {
                "targets": ["Linear"], "output_activations": null,
                "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": true, "dynamic": false},
                "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": true},
            }},
        })
    }

    fn blocks() -> Value {
        json!({"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]})
    }

    /// Returns [`blocks`] with one value replaced.
    fn blocks_with(key: &str, value: Value) -> Value {
        let mut config = blocks();
        config[key] = value;
        config
    }

    /// Returns the test config with one value replaced, at a JSON pointer.
    fn with(path: &str, value: Value) -> Value {
        let mut config = channels();
        let (parent, key) = path.rsplit_once('/').expect("a pointer");
        let parent = config.pointer_mut(parent).unwrap_or_else(|| panic!("{path}"));
        parent[key] = value;
        config
    }

    #[test]
    fn published_forms_are_taken() {
        let group = "/config_groups/group_0";
        assert_eq!(activations(&channels()), Ok(ActivationFormat::Fp8), "a scale for each row");
        let of_matrix = with(&format!("{group}/weights/strategy"), json!("tensor"));
        assert_eq!(activations(&of_matrix), Ok(ActivationFormat::Fp8), "one for each matrix");
        let weights_alone = with(&format!("{group}/input_activations"), json!(null));
        assert_eq!(activations(&weights_alone), Ok(ActivationFormat::Full));
        let fbgemm = json!({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]});
        assert_eq!(activations(&fbgemm), Ok(ActivationFormat::Fp8));
        let no_transforms = with("/transform_config", json!({"config_groups": {}}));
        assert_eq!(activations(&no_transforms), Ok(ActivationFormat::Fp8));
        let mut of_blocks = with(&format!("{group}/weights/strategy"), json!("block"));
        of_blocks["config_groups"]["group_0"]["weights"]["block_structure"] = json!([128, 128]);
        assert_eq!(activations(&of_blocks), Ok(ActivationFormat::Fp8), "one for each block");
        assert_eq!(activations(&blocks()), Ok(ActivationFormat::Fp8));
        let mut with_all = blocks();
        with_all["scale_fmt"] = json!("ue8m0");
        with_all["modules_to_not_convert"] = json!(["lm_head"]);
        assert_eq!(activations(&with_all), Ok(ActivationFormat::Fp8));
        let least = json!({"quant_method": "fp8", "weight_block_size": [128, 128]});
        assert_eq!(activations(&least), Ok(ActivationFormat::Fp8));
    }

    #[test]
    fn scales_of_kv_are_fixed_numbers_for_8_bits() {
        let scheme = json!({"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": false, "symmetric": true});
        let of_scheme = |key: &str, value: Value| {
            let mut scheme = scheme.clone();
            scheme[key] = value;
            has_kv_scales(&with("/kv_cache_scheme", scheme))
        };
        assert_eq!(has_kv_scales(&channels()), Ok(false), "null");
        assert_eq!(has_kv_scales(&blocks()), Ok(false), "no key");
        assert_eq!(of_scheme("actorder", json!(null)), Ok(true));
        assert_eq!(of_scheme("strategy", json!("attn_head")), Ok(true));
        let of_tool = has_kv_scales(&with("/kv_cache_scheme", json!("static")));
        for (found, expected) in [
            (of_tool, "type null is not implemented: float is"),
            (of_scheme("type", json!("int")), "type \"int\" is not implemented: float is"),
            (of_scheme("num_bits", json!(4)), "num_bits 4 is not implemented: 8 is"),
            (
                of_scheme("strategy", json!("channel")),
                "strategy \"channel\" is not implemented: tensor or attn_head is",
            ),
            (of_scheme("dynamic", json!(true)), "dynamic true is not implemented: false is"),
            (of_scheme("symmetric", json!(false)), "symmetric false is not implemented: true is"),
        ] {
            assert_eq!(found, Err(format!("quantization_config: kv_cache_scheme: {expected}")));
        }
    }

    #[test]
    fn all_else_is_refused_by_name() {
        let group = "/config_groups/group_0";
        for (config, expected) in [
            (json!({}), "quantization_config names no quant_method"),
            (
                json!({"quant_method": "gptq", "bits": 4}),
                "quant_method \"gptq\" is not implemented: compressed-tensors",
            ),
            (json!({"quant_method": "awq"}), "quant_method \"awq\" is not implemented"),
            (
                blocks_with("weight_block_size", json!([64, 128])),
                "weight_block_size [64,128] is not implemented: [128,128] is",
            ),
            (blocks_with("weight_block_size", json!(null)), "weight_block_size null is not implemented"),
            (
                blocks_with("activation_scheme", json!("static")),
                "activation_scheme \"static\" is not implemented: dynamic is",
            ),
            (blocks_with("fmt", json!("e5m2")), "fmt \"e5m2\" is not implemented: e4m3 is"),
            (blocks_with("scale_fmt", json!("f32")), "scale_fmt \"f32\" is not implemented: ue8m0 is"),
            (
                with("/format", json!("pack-quantized")),
                "format \"pack-quantized\" is not implemented: float-quantized is",
            ),
            (with("/config_groups", json!({})), "config_groups names none"),
            (
                with("/transform_config", json!({"config_groups": {"u": {"type": "hadamard"}}})),
                "transform_config is not implemented",
            ),
            (with(group, json!({})), "has no weights"),
            (
                with(&format!("{group}/weights/type"), json!("int")),
                "type \"int\" is not implemented: float is",
            ),
            (with(&format!("{group}/weights/num_bits"), json!(4)), "num_bits 4 is not implemented: 8 is"),
            (
                with(&format!("{group}/weights/strategy"), json!("group")),
                "strategy \"group\" is not implemented: channel or tensor or block is",
            ),
            (
                with(&format!("{group}/weights/strategy"), json!("block")),
                "block_structure null is not implemented: [128,128] is",
            ),
            (with(&format!("{group}/weights/symmetric"), json!(false)), "asymmetric"),
            (
                with(&format!("{group}/input_activations/dynamic"), json!(false)),
                "static scales are not implemented",
            ),
            (with(&format!("{group}/output_activations"), json!({"num_bits": 8})), "output_activations"),
            (
                with(&format!("{group}/input_activations/num_bits"), json!(4)),
                "num_bits of input_activations 4 is not implemented: 8 is",
            ),
            (
                with(&format!("{group}/input_activations/type"), json!("int")),
                "type \"int\" is not implemented: float is",
            ),
            (
                with(
                    "/config_groups/group_1",
                    json!({"weights": channels()["config_groups"]["group_0"]["weights"]}),
                ),
                "with and without input_activations",
            ),
        ] {
            let error = activations(&config).expect_err(expected);
            assert!(error.contains(expected), "{error}");
        }
    }
}

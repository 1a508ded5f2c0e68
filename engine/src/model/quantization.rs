//! The supported quantized checkpoints: FP8 weights with a scale for each row or each matrix, as two tools
//! publish them.
//!
//! The config names the format of a checkpoint; the files have the type of each tensor. The config's settings
//! for rounding activations have no effect, because activations keep their precision.

use serde_json::{Map, Value};

/// Rejects quantization settings that are not implemented, with their names.
pub fn check(config: &Value) -> Result<(), String> {
    match config.get("quant_method").and_then(Value::as_str) {
        Some("compressed-tensors") => check_compressed_tensors(config),
        Some("fbgemm_fp8") => Ok(()),
        Some(method) => Err(format!(
            "quantization_config: quant_method {method:?} is not implemented: compressed-tensors and fbgemm_fp8 are, \
             with FP8 weights; or load the original and quantize it here"
        )),
        None => Err("quantization_config names no quant_method".to_owned()),
    }
}

fn check_compressed_tensors(config: &Value) -> Result<(), String> {
    let is_set = |key: &str| config.get(key).is_some_and(|value| !value.is_null());
    expect(config, "format", &["float-quantized"])?;
    if is_set("kv_cache_scheme") {
        return Err("quantization_config: kv_cache_scheme is not implemented: KV has no scales".to_owned());
    }
    if config.get("sparsity_config").is_some_and(|sparsity| !is_dense(sparsity)) {
        return Err("quantization_config: sparsity_config is not implemented".to_owned());
    }
    let groups = config.get("config_groups").and_then(Value::as_object).filter(|groups| !groups.is_empty());
    let groups = groups.ok_or("quantization_config: config_groups names none")?;
    groups.values().try_for_each(check_group)
}

fn is_dense(sparsity: &Value) -> bool {
    sparsity.is_null()
        || sparsity.as_object().is_some_and(Map::is_empty)
        || sparsity.get("format").and_then(Value::as_str) == Some("dense")
}

fn check_group(group: &Value) -> Result<(), String> {
    let weights = group.get("weights").filter(|weights| weights.is_object());
    let weights = weights.ok_or("quantization_config: a group of config_groups has no weights")?;
    expect(weights, "type", &["float"])?;
    expect(weights, "strategy", &["channel", "tensor"])?;
    if weights.get("num_bits").and_then(Value::as_u64) != Some(8) {
        return Err(refusal("num_bits", weights.get("num_bits"), &["8"]));
    }
    if weights.get("symmetric").and_then(Value::as_bool) == Some(false) {
        return Err("quantization_config: asymmetric weights are not implemented".to_owned());
    }
    if group.get("output_activations").is_some_and(|outputs| !outputs.is_null()) {
        return Err("quantization_config: output_activations are not implemented".to_owned());
    }
    match group.get("input_activations").filter(|inputs| !inputs.is_null()) {
        Some(inputs) if inputs.get("dynamic").and_then(Value::as_bool) != Some(true) => Err(
            "quantization_config: input_activations with static scales are not implemented: dynamic ones are"
                .to_owned(),
        ),
        _ => Ok(()),
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

    /// Returns the test config with one value replaced, at a JSON pointer.
    fn with(path: &str, value: Value) -> Value {
        let mut config = channels();
        let at = config.pointer_mut(path).unwrap_or_else(|| panic!("{path}"));
        *at = value;
        config
    }

    #[test]
    fn published_forms_are_taken() {
        check(&channels()).expect("a scale for each row");
        check(&with("/config_groups/group_0/weights/strategy", json!("tensor")))
            .expect("one for each matrix");
        check(&with("/config_groups/group_0/input_activations", json!(null))).expect("weights alone");
        let fbgemm = json!({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]});
        check(&fbgemm).expect("a scale for each row");
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
                json!({"quant_method": "fp8", "weight_block_size": [128, 128]}),
                "quant_method \"fp8\" is not implemented",
            ),
            (
                with("/format", json!("pack-quantized")),
                "format \"pack-quantized\" is not implemented: float-quantized is",
            ),
            (with("/kv_cache_scheme", json!({"num_bits": 8})), "kv_cache_scheme is not implemented"),
            (with("/config_groups", json!({})), "config_groups names none"),
            (with(group, json!({})), "has no weights"),
            (
                with(&format!("{group}/weights/type"), json!("int")),
                "type \"int\" is not implemented: float is",
            ),
            (with(&format!("{group}/weights/num_bits"), json!(4)), "num_bits 4 is not implemented: 8 is"),
            (
                with(&format!("{group}/weights/strategy"), json!("block")),
                "strategy \"block\" is not implemented: channel or tensor is",
            ),
            (with(&format!("{group}/weights/symmetric"), json!(false)), "asymmetric"),
            (
                with(&format!("{group}/input_activations/dynamic"), json!(false)),
                "static scales are not implemented",
            ),
            (with(&format!("{group}/output_activations"), json!({"num_bits": 8})), "output_activations"),
        ] {
            let error = check(&config).expect_err(expected);
            assert!(error.contains(expected), "{error}");
        }
    }
}

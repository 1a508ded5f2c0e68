//! `tokenizer.json` and `tokenizer_config.json`, made of a GGUF file's keys.

use std::collections::HashMap;

use serde_json::{Map, Value as Json, json};

use super::config::CONTROL;
use super::header::{Header, Value};
use super::model::Model;

/// The types of tokens that are no plain pieces of text, beside [`CONTROL`].
const UNKNOWN: u64 = 2;
const USER_DEFINED: u64 = 4;
const UNUSED: u64 = 5;
const NORMAL: u64 = 1;

/// How a text is divided before its pieces are tokenized.
struct Division {
    /// The names in `tokenizer.ggml.pre`.
    names: &'static [&'static str],
    by: By,
    /// Whether Unicode's form C is made first.
    is_normalized: bool,
    /// Whether a piece that is a token becomes it without merges.
    ignores_merges: bool,
    /// Whether a text begins with the bos token, if the file does not say it.
    adds_bos: bool,
}

enum By {
    Regex(&'static str),
    /// GPT-2's own expression.
    Gpt2,
    /// Every digit alone, the rest as in GPT-2.
    DigitsAndGpt2,
}

/// The known divisions. The expressions are those of the models' `tokenizer.json`.
const DIVISIONS: &[Division] = &[
    Division {
        names: &["llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"],
        by: By::Regex(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        is_normalized: false,
        ignores_merges: true,
        adds_bos: true,
    },
    Division {
        names: &["qwen2", "deepseek-r1-qwen"],
        by: By::Regex(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        is_normalized: true,
        ignores_merges: false,
        adds_bos: false,
    },
    Division {
        names: &["tekken"],
        by: By::Regex(
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        is_normalized: false,
        ignores_merges: true,
        adds_bos: true,
    },
    Division {
        names: &["gpt-2"],
        by: By::Gpt2,
        is_normalized: false,
        ignores_merges: false,
        adds_bos: false,
    },
    Division {
        names: &["smollm", "starcoder", "refact"],
        by: By::DigitsAndGpt2,
        is_normalized: false,
        ignores_merges: false,
        adds_bos: false,
    },
];

/// The tokens of a file.
struct Tokens<'a> {
    texts: Vec<&'a str>,
    types: Vec<u64>,
    ids: HashMap<&'a str, usize>,
}

/// Makes the two files; `None` if the model has no tokenizer.
pub(super) fn tokenizer(header: &Header<'_>, model: &Model) -> Result<Option<(Json, Json)>, String> {
    let kind = match header.text("tokenizer.ggml.model")? {
        None | Some("none" | "no_vocab") => return Ok(None),
        Some(kind) => kind,
    };
    let tokens = Tokens::of(header, model)?;
    let (parts, adds_bos) = match kind {
        "gpt2" => byte_level(header, &tokens)?,
        "llama" => sentence_pieces(header, &tokens)?,
        _ => return Err(format!("tokenizer.ggml.model {kind:?} is not implemented: gpt2 and llama are")),
    };
    if header.bool("tokenizer.ggml.add_eos_token")?.unwrap_or(false) {
        return Err("tokenizer.ggml.add_eos_token is set, which is not implemented".to_owned());
    }
    let adds_bos = header.bool("tokenizer.ggml.add_bos_token")?.unwrap_or(adds_bos);
    let mut config = config(header, &tokens)?;
    if adds_bos && !config.contains_key("bos_token") {
        return Err(
            "a text begins with the bos token, and there is no key tokenizer.ggml.bos_token_id".to_owned()
        );
    }
    config.insert("add_bos_token".to_owned(), adds_bos.into());
    Ok(Some((whole(parts, &tokens), Json::Object(config))))
}

impl<'a> Tokens<'a> {
    fn of(header: &Header<'a>, model: &Model) -> Result<Self, String> {
        let key = "tokenizer.ggml.tokens";
        let texts = header.list(key, Value::text)?.ok_or_else(|| format!("there is no key {key}"))?;
        if texts.len() as u64 > model.vocab {
            return Err(format!("{key} has {} tokens, and the embedding {}", texts.len(), model.vocab));
        }
        let key = "tokenizer.ggml.token_type";
        let types = header.list(key, Value::count)?.unwrap_or_else(|| vec![NORMAL; texts.len()]);
        if types.len() != texts.len() {
            return Err(format!("{key} has {} entries for {} tokens", types.len(), texts.len()));
        }
        let mut ids = HashMap::with_capacity(texts.len());
        for (id, text) in texts.iter().enumerate().filter(|(id, _)| types[*id] != UNUSED) {
            if let Some(other) = ids.insert(*text, id) {
                return Err(format!("tokens {other} and {id} have the same text, {text:?}"));
            }
        }
        Ok(Self { texts, types, ids })
    }

    fn ids_of(&self, kind: u64) -> impl Iterator<Item = usize> {
        self.types.iter().enumerate().filter(move |(_, found)| **found == kind).map(|(id, _)| id)
    }

    /// Returns the texts with their numbers, in the order of the numbers.
    fn vocab(&self) -> Json {
        let used = self.texts.iter().enumerate().filter(|(id, _)| self.types[*id] != UNUSED);
        Json::Object(used.map(|(id, text)| ((*text).to_owned(), id.into())).collect())
    }

    /// Returns the token that a key names.
    fn named(&self, header: &Header<'_>, key: &str) -> Result<Option<&'a str>, String> {
        let key = format!("tokenizer.ggml.{key}");
        let Some(id) = header.count(&key)? else { return Ok(None) };
        let text = usize::try_from(id).ok().and_then(|id| self.texts.get(id).copied());
        text.map(Some).ok_or_else(|| format!("key {key} is {id}, of {} tokens", self.texts.len()))
    }
}

/// Puts the parts together with what every `tokenizer.json` has.
fn whole(parts: Map<String, Json>, tokens: &Tokens<'_>) -> Json {
    let added = |id: usize, is_special: bool| {
        json!({"id": id, "content": tokens.texts[id], "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": is_special})
    };
    let special = [CONTROL, UNKNOWN].into_iter().flat_map(|kind| tokens.ids_of(kind)).map(|id| (id, true));
    let mut all: Vec<(usize, bool)> =
        special.chain(tokens.ids_of(USER_DEFINED).map(|id| (id, false))).collect();
    all.sort_unstable();
    let added: Vec<Json> = all.into_iter().map(|(id, is_special)| added(id, is_special)).collect();
    let mut json = Map::from_iter([
        ("version".to_owned(), "1.0".into()),
        ("truncation".to_owned(), Json::Null),
        ("padding".to_owned(), Json::Null),
        ("added_tokens".to_owned(), added.into()),
        ("post_processor".to_owned(), Json::Null),
    ]);
    json.extend(parts);
    Json::Object(json)
}

/// Makes the parts for tokens of bytes, each byte a character as in GPT-2. Returns also whether a text begins with the bos
/// token by default.
fn byte_level(header: &Header<'_>, tokens: &Tokens<'_>) -> Result<(Map<String, Json>, bool), String> {
    let key = "tokenizer.ggml.pre";
    let known =
        || DIVISIONS.iter().flat_map(|division| division.names).copied().collect::<Vec<_>>().join(", ");
    let name = header.text(key)?.ok_or_else(|| {
        format!("there is no key {key}: the file is older than this key, convert the model again")
    })?;
    let division = DIVISIONS.iter().find(|division| division.names.contains(&name));
    let division = division.ok_or_else(|| format!("{key} {name:?} is not implemented: {} are", known()))?;
    let merges = header.list("tokenizer.ggml.merges", Value::text)?;
    let merges = merges.ok_or("there is no key tokenizer.ggml.merges")?;
    let merge = |merge: &&str| match merge.split_once(' ') {
        Some((left, right)) if has_both(tokens, left, right) => Ok(json!([left, right])),
        _ => Err(format!("tokenizer.ggml.merges: {merge:?} does not join two tokens to a third")),
    };
    let merges = merges.iter().map(merge).collect::<Result<Vec<_>, _>>()?;
    // Spaces are not added, offsets are not used.
    let byte_level = |with_regex: bool| {
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
            "use_regex": with_regex})
    };
    let sequence = |first: Json, then: Json| json!({"type": "Sequence", "pretokenizers": [first, then]});
    let pre_tokenizer = match division.by {
        By::Gpt2 => byte_level(true),
        By::DigitsAndGpt2 => sequence(json!({"type": "Digits", "individual_digits": true}), byte_level(true)),
        By::Regex(regex) => {
            let pattern = json!({"Regex": regex});
            let split = json!({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": false});
            sequence(split, byte_level(false))
        }
    };
    let model = json!({"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
        "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
        "ignore_merges": division.ignores_merges, "vocab": tokens.vocab(), "merges": merges});
    let normalizer = if division.is_normalized { json!({"type": "NFC"}) } else { Json::Null };
    let parts = [
        ("normalizer", normalizer),
        ("pre_tokenizer", pre_tokenizer),
        ("decoder", byte_level(true)),
        ("model", model),
    ];
    Ok((parts.map(|(name, part)| (name.to_owned(), part)).into_iter().collect(), division.adds_bos))
}

fn has_both(tokens: &Tokens<'_>, left: &str, right: &str) -> bool {
    let is_token = |text: &str| tokens.ids.contains_key(text);
    is_token(left) && is_token(right) && is_token(&format!("{left}{right}"))
}

/// Makes the parts for SentencePiece's tokens of characters, with bytes for unknown characters.
fn sentence_pieces(header: &Header<'_>, tokens: &Tokens<'_>) -> Result<(Map<String, Json>, bool), String> {
    let space = "\u{2581}";
    let unknown = tokens.named(header, "unknown_token_id")?;
    let unknown = unknown.or_else(|| tokens.ids_of(UNKNOWN).next().map(|id| tokens.texts[id]));
    let prefix = header.bool("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
    if header.bool("tokenizer.ggml.remove_extra_whitespaces")?.unwrap_or(false) {
        return Err("tokenizer.ggml.remove_extra_whitespaces is set, which is not implemented".to_owned());
    }
    let replace =
        |from: &str, to: &str| json!({"type": "Replace", "pattern": {"String": from}, "content": to});
    let mut normalizers = vec![replace(" ", space)];
    let mut decoders = vec![replace(space, " "), json!({"type": "ByteFallback"}), json!({"type": "Fuse"})];
    if prefix {
        normalizers.insert(0, json!({"type": "Prepend", "prepend": space}));
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    let model = json!({"type": "BPE", "dropout": null, "unk_token": unknown, "continuing_subword_prefix": null,
        "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
        "vocab": tokens.vocab(), "merges": merges_by_score(header, tokens)?});
    let parts = [
        ("normalizer", json!({"type": "Sequence", "normalizers": normalizers})),
        ("pre_tokenizer", Json::Null),
        ("decoder", json!({"type": "Sequence", "decoders": decoders})),
        ("model", model),
    ];
    Ok((parts.map(|(name, part)| (name.to_owned(), part)).into_iter().collect(), true))
}

/// Returns the pairs of tokens that make a token, the token with the best score first. SentencePiece makes the token with
/// the best score among all that neighbours make.
fn merges_by_score(header: &Header<'_>, tokens: &Tokens<'_>) -> Result<Vec<Json>, String> {
    let key = "tokenizer.ggml.scores";
    let scores = header.list(key, Value::real)?.ok_or_else(|| format!("there is no key {key}"))?;
    if scores.len() != tokens.texts.len() {
        return Err(format!("{key} has {} entries for {} tokens", scores.len(), tokens.texts.len()));
    }
    let mut by_score: Vec<usize> = tokens.ids_of(NORMAL).collect();
    by_score.sort_by(|one, other| scores[*other].total_cmp(&scores[*one]).then(one.cmp(other)));
    let mut merges = Vec::new();
    for text in by_score.into_iter().map(|id| tokens.texts[id]) {
        let cuts = text.char_indices().skip(1).map(|(at, _)| text.split_at(at));
        let ids = |(left, right): (&str, &str)| Some((*tokens.ids.get(left)?, *tokens.ids.get(right)?));
        let mut pairs: Vec<(usize, usize)> = cuts.filter_map(ids).collect();
        pairs.sort_unstable();
        merges
            .extend(pairs.into_iter().map(|(left, right)| json!([tokens.texts[left], tokens.texts[right]])));
    }
    Ok(merges)
}

fn config(header: &Header<'_>, tokens: &Tokens<'_>) -> Result<Map<String, Json>, String> {
    let mut config = Map::new();
    for (key, name) in [
        ("bos_token_id", "bos_token"),
        ("eos_token_id", "eos_token"),
        ("unknown_token_id", "unk_token"),
        ("padding_token_id", "pad_token"),
    ] {
        config.extend(tokens.named(header, key)?.map(|text| (name.to_owned(), text.into())));
    }
    let default = header.text("tokenizer.chat_template")?;
    let with_tools = header.text("tokenizer.chat_template.tool_use")?;
    let template = match (default, with_tools) {
        (Some(default), Some(with_tools)) => Some(json!([
            {"name": "default", "template": default},
            {"name": "tool_use", "template": with_tools},
        ])),
        (default, _) => default.map(Json::from),
    };
    config.extend(template.map(|template| ("chat_template".to_owned(), template)));
    Ok(config)
}

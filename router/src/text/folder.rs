//! Reads the files about text in a Hugging Face model folder.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use grammar::AddedTokens;
use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};
use tracing::warn;
use types::node::tokenizer_digest;
use types::{Sampling, TokenId};

use super::tokenizer::{Bos, HuggingFace, Tokenizer, TokenizerError};
use super::{ChatTemplate, ServedModel};
use crate::error::TextError;

const CONFIG: &str = "config.json";
const GENERATION_CONFIG: &str = "generation_config.json";
const TOKENIZER: &str = "tokenizer.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
const SPECIAL_TOKENS: &str = "special_tokens_map.json";
const CHAT_TEMPLATE: &str = "chat_template.jinja";
const TOOL_TEMPLATE: &str = "additional_chat_templates/tool_use.jinja";

/// The default temperature of OpenAI's endpoints, used if neither the request nor the model has one.
const TEMPERATURE: f32 = 1.0;

/// Loads the tokenizer and template of the model in `folder`, to be served under the name `name`.
///
/// Without `tokenizer.json` the model serves token ids only; without a chat template, completions only.
pub fn open(folder: &Path, name: &str) -> Result<ServedModel, TextError> {
    let config: ModelConfig = required(folder, CONFIG)?;
    let generation: GenerationConfig = optional(folder, GENERATION_CONFIG)?.unwrap_or_default();
    let text: TokenizerConfig = optional(folder, TOKENIZER_CONFIG)?.unwrap_or_default();
    let text = text.with_specials_of(optional(folder, SPECIAL_TOKENS)?.unwrap_or_default());
    let tokenizer = tokenizer(folder, &text)?;
    let eos = generation.eos_token_id.as_ref().or(config.eos_token_id.as_ref());
    Ok(ServedModel {
        name: name.to_owned(),
        template: match tokenizer {
            Tokenizer::Absent => None,
            Tokenizer::Bytes | Tokenizer::HuggingFace(_) => template(folder, &text)?,
        },
        tokenizer: tokenizer.into(),
        context_tokens: config.context_tokens(),
        is_short: false,
        vocab: config.vocab_size,
        eos: eos.map(Ids::tokens).unwrap_or_default(),
        defaults: generation.sampling(&folder.join(GENERATION_CONFIG))?,
    })
}

// === config.json ===

#[derive(Debug, Deserialize)]
struct ModelConfig {
    vocab_size: u32,
    max_position_embeddings: u32,
    original_max_position_embeddings: Option<f32>,
    rope_scaling: Option<RopeScaling>,
    rope_parameters: Option<RopeScaling>,
    eos_token_id: Option<Ids>,
}

/// The rotary settings on which the longest sequence depends.
#[derive(Debug, Deserialize)]
struct RopeScaling {
    rope_type: Option<String>,
    #[serde(rename = "type")]
    older_type: Option<String>,
    factor: Option<f32>,
    original_max_position_embeddings: Option<f32>,
}

impl ModelConfig {
    /// Returns the longest sequence, as nodes compute it. YaRN is made for a multiple of the trained tokens, which some
    /// configs do not count.
    fn context_tokens(&self) -> u32 {
        let positions = self.max_position_embeddings;
        let rope = self.rope_parameters.as_ref().or(self.rope_scaling.as_ref());
        let is_yarn = |rope: &&RopeScaling| {
            rope.rope_type.as_ref().or(rope.older_type.as_ref()).is_some_and(|kind| kind == "yarn")
        };
        let Some(rope) = rope.filter(is_yarn) else { return positions };
        let trained = self.original_max_position_embeddings.or(rope.original_max_position_embeddings);
        positions.max((trained.unwrap_or(positions as f32) * rope.factor.unwrap_or(1.0)) as u32)
    }
}

/// The value of `eos_token_id`: one token id, or several.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a token id, or a list of token ids")]
enum Ids {
    One(u32),
    Several(Vec<u32>),
}

impl Ids {
    fn tokens(&self) -> Vec<TokenId> {
        match self {
            Self::One(id) => vec![TokenId(*id)],
            Self::Several(ids) => ids.iter().copied().map(TokenId).collect(),
        }
    }
}

// === generation_config.json ===

/// The sampling that the model's authors recommend.
#[derive(Debug, Default, Deserialize)]
struct GenerationConfig {
    eos_token_id: Option<Ids>,
    do_sample: Option<bool>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<i64>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
}

impl GenerationConfig {
    /// Returns the sampling defaults. `do_sample = false` means greedy, at any temperature.
    fn sampling(&self, file: &Path) -> Result<Sampling, TextError> {
        let number =
            |field, value: Option<f32>, default, fits: fn(f32) -> bool| match value.unwrap_or(default) {
                value if value.is_finite() && fits(value) => Ok(value),
                value => Err(TextError::Field {
                    file: file.to_owned(),
                    field,
                    reason: format!("is out of range: {value}"),
                }),
            };
        let temperature = number("temperature", self.temperature, TEMPERATURE, |value| value >= 0.0)?;
        Ok(Sampling {
            temperature: if self.do_sample == Some(false) { 0.0 } else { temperature },
            top_p: number("top_p", self.top_p, 1.0, |value| value > 0.0 && value <= 1.0)?,
            top_k: self.top_k.and_then(|k| u32::try_from(k).ok()).unwrap_or(0),
            min_p: number("min_p", self.min_p, 0.0, |value| (0.0..=1.0).contains(&value))?,
            repetition_penalty: number("repetition_penalty", self.repetition_penalty, 1.0, |value| {
                value > 0.0
            })?,
            ..Sampling::default()
        })
    }
}

// === tokenizer.json and tokenizer_config.json ===

#[derive(Debug, Default, Deserialize)]
struct TokenizerConfig {
    add_bos_token: Option<bool>,
    bos_token: Option<Special>,
    eos_token: Option<Special>,
    unk_token: Option<Special>,
    sep_token: Option<Special>,
    pad_token: Option<Special>,
    cls_token: Option<Special>,
    mask_token: Option<Special>,
    chat_template: Option<Templates>,
    added_tokens_decoder: Option<IgnoredAny>,
}

/// A special token: its text, or an object with its text and other properties.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a token's text, or an object with it as `content`")]
enum Special {
    Name(String),
    Token { content: String },
}

impl Special {
    fn name(&self) -> &str {
        match self {
            Self::Name(name) | Self::Token { content: name } => name,
        }
    }
}

/// The value of `chat_template`: one chat template, or several with names.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a template, or a list of templates with names")]
enum Templates {
    One(String),
    Named(Vec<NamedTemplate>),
}

#[derive(Debug, Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

impl TokenizerConfig {
    /// Replaces the special tokens that `special_tokens_map.json` has too. That file counts in repositories that do not
    /// list their added tokens here: `transformers` does the same.
    fn with_specials_of(self, map: Self) -> Self {
        if self.added_tokens_decoder.is_some() {
            return self;
        }
        Self {
            bos_token: map.bos_token.or(self.bos_token),
            eos_token: map.eos_token.or(self.eos_token),
            unk_token: map.unk_token.or(self.unk_token),
            sep_token: map.sep_token.or(self.sep_token),
            pad_token: map.pad_token.or(self.pad_token),
            cls_token: map.cls_token.or(self.cls_token),
            mask_token: map.mask_token.or(self.mask_token),
            ..self
        }
    }

    /// Returns the special tokens as template variables.
    fn specials(&self) -> Vec<(String, String)> {
        [
            ("bos_token", &self.bos_token),
            ("eos_token", &self.eos_token),
            ("unk_token", &self.unk_token),
            ("sep_token", &self.sep_token),
            ("pad_token", &self.pad_token),
            ("cls_token", &self.cls_token),
            ("mask_token", &self.mask_token),
        ]
        .into_iter()
        .filter_map(|(variable, token)| Some((variable.to_owned(), token.as_ref()?.name().to_owned())))
        .collect()
    }

    fn bos(&self, tokenizer: &HuggingFace, file: PathBuf) -> Result<Bos, TextError> {
        let name = match self.add_bos_token {
            None => return Ok(Bos::PostProcessor),
            Some(false) => return Ok(Bos::Nothing),
            Some(true) => self.bos_token.as_ref().map(Special::name),
        };
        name.and_then(|name| tokenizer.named(name)).map(Bos::Token).ok_or_else(|| TextError::Field {
            file,
            field: "bos_token",
            reason: format!("must be a token of {TOKENIZER}, because `add_bos_token` is set"),
        })
    }
}

fn tokenizer(folder: &Path, config: &TokenizerConfig) -> Result<Tokenizer, TextError> {
    let file = folder.join(TOKENIZER);
    let Some(json) = read(&file)? else { return Ok(Tokenizer::Absent) };
    let failed = |source: TokenizerError| TextError::Tokenizer { file: file.clone(), source };
    let added = AddedTokens::in_folder(folder).map_err(|error| failed(error.into()))?;
    let (inner, left_out) = added.tokenizer(&json).map_err(|error| failed(error.into()))?;
    if !left_out.is_empty() {
        let (file, tokens) = (file.display(), left_out.join(" "));
        warn!(%file, tokens, "added tokens are left out: the tokenizer would give them other ids");
    }
    let tokenizer = HuggingFace::of(inner, tokenizer_digest(&json)).map_err(failed)?;
    let bos = config.bos(&tokenizer, folder.join(TOKENIZER_CONFIG))?;
    Ok(Tokenizer::HuggingFace(Box::new(tokenizer.with_bos(bos))))
}

fn template(folder: &Path, config: &TokenizerConfig) -> Result<Option<ChatTemplate>, TextError> {
    let Some(TemplateSources { default, with_tools }) = sources(folder, config)? else { return Ok(None) };
    let compiled = |file| move |source| TextError::CompileTemplate { file, source };
    let template = ChatTemplate::new(&default.text, config.specials()).map_err(compiled(default.file))?;
    let Some(with_tools) = with_tools else { return Ok(Some(template)) };
    template.with_tools(&with_tools.text).map(Some).map_err(compiled(with_tools.file))
}

/// A chat template, and the file that contains it.
struct TemplateSource {
    file: PathBuf,
    text: String,
}

/// A model's chat templates.
struct TemplateSources {
    default: TemplateSource,
    with_tools: Option<TemplateSource>,
}

/// Finds the chat templates. Separate files come first, because newer models use them.
fn sources(folder: &Path, config: &TokenizerConfig) -> Result<Option<TemplateSources>, TextError> {
    let separate = |name| {
        let file = folder.join(name);
        let bytes = read(&file)?;
        let text = bytes.map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        Ok::<_, TextError>(text.map(|text| TemplateSource { file, text }))
    };
    let (json, with_tools) = (folder.join(TOKENIZER_CONFIG), separate(TOOL_TEMPLATE)?);
    if let Some(default) = separate(CHAT_TEMPLATE)? {
        return Ok(Some(TemplateSources { default, with_tools }));
    }
    match &config.chat_template {
        None => Ok(None),
        Some(Templates::One(source)) => Ok(Some(TemplateSources {
            default: TemplateSource { file: json, text: source.clone() },
            with_tools,
        })),
        Some(Templates::Named(named)) => {
            let named = by_name(json, named)?;
            Ok(Some(TemplateSources { with_tools: with_tools.or(named.with_tools), ..named }))
        }
    }
}

fn by_name(file: PathBuf, named: &[NamedTemplate]) -> Result<TemplateSources, TextError> {
    let find = |name| {
        let found = named.iter().find(|named| named.name == name);
        found.map(|named| TemplateSource { file: file.clone(), text: named.template.clone() })
    };
    match find("default") {
        Some(default) => Ok(TemplateSources { default, with_tools: find("tool_use") }),
        None => Err(TextError::Field {
            file,
            field: "chat_template",
            reason: "has no template named `default`".to_owned(),
        }),
    }
}

// === files ===

/// Returns a file's bytes; `None` if it does not exist.
fn read(file: &Path) -> Result<Option<Vec<u8>>, TextError> {
    match fs::read(file) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(TextError::Read { file: file.to_owned(), source }),
    }
}

fn optional<T: DeserializeOwned>(folder: &Path, name: &str) -> Result<Option<T>, TextError> {
    let file = folder.join(name);
    read(&file)?.map(|json| parsed(file, &json)).transpose()
}

fn required<T: DeserializeOwned>(folder: &Path, name: &str) -> Result<T, TextError> {
    let file = folder.join(name);
    let json = fs::read(&file).map_err(|source| TextError::Read { file: file.clone(), source })?;
    parsed(file, &json)
}

fn parsed<T: DeserializeOwned>(file: PathBuf, json: &[u8]) -> Result<T, TextError> {
    serde_path_to_error::deserialize(&mut serde_json::Deserializer::from_slice(json)).map_err(|error| {
        let place = match error.path().to_string().as_str() {
            "." => file.display().to_string(),
            field => format!("{}: `{field}`", file.display()),
        };
        TextError::Parse { place, source: error.into_inner() }
    })
}

#[cfg(test)]
mod tests;

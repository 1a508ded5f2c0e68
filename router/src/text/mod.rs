//! Text, which only the router handles: messages to tokens, and tokens to text.

pub mod detokenizer;
mod dialect;
pub mod folder;
pub mod parts;
pub mod reasoning;
pub mod stop;
mod tags;
pub mod template;
pub mod tokenizer;
pub mod tokenizing;
pub mod tools;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, PoisonError, RwLock};

use types::node::{FingerprintMismatch, TOKENIZER, TOKENIZER_BYTES, TOKENIZER_NONE};
use types::{ModelInfo, Sampling, TokenId};

pub use detokenizer::Detokenizer;
pub use parts::{Parts, PartsParser, PartsRules};
pub use stop::StopStrings;
pub use template::{Chat, ChatTemplate};
pub use tokenizer::{CacheScope, PromptText, Tokenizer};
pub use tokenizing::Tokenizing;
use tools::ToolFormat;

use crate::error::{AcceptError, TextError};

/// A model with the parts that the router needs to serve requests for it.
#[derive(Clone, Debug)]
pub struct ServedModel {
    pub name: String,
    pub tokenizer: Arc<Tokenizer>,
    /// The chat template; `None`: the model serves completions only.
    pub template: Option<ChatTemplate>,
    /// The longest sequence, prompt and output together.
    pub context_tokens: u32,
    /// Whether a node's KV memory, and not the model, limits the length.
    pub is_short: bool,
    /// The number of token ids. The model may have more tokens than its tokenizer.
    pub vocab: u32,
    /// The tokens that end the model's answers.
    pub eos: Vec<TokenId>,
    /// The sampling defaults. Real models have their own (`generation_config.json`).
    pub defaults: Sampling,
}

impl ServedModel {
    /// Loads the tokenizer and template of a Hugging Face folder. Reads files of several megabytes.
    pub fn open(folder: &Path, name: &str) -> Result<Self, TextError> {
        folder::open(folder, name)
    }

    /// Sets how the model writes tool calls; `None`: as its chat template shows it.
    #[must_use]
    pub fn with_tool_format(self, format: Option<ToolFormat>) -> Self {
        let template = self.template.map(|template| match format {
            Some(format) => template.with_tool_format(format),
            None => template,
        });
        Self { template, ..self }
    }

    /// Makes the mock model: a token is a byte, and the answer to a prompt is a function of the prompt.
    pub fn mock(name: impl Into<String>, context_tokens: u32) -> Self {
        Self {
            name: name.into(),
            tokenizer: Arc::new(Tokenizer::Bytes),
            template: Some(ChatTemplate::plain()),
            context_tokens,
            is_short: false,
            vocab: Tokenizer::Bytes.vocab(),
            eos: vec![tokenizer::END],
            defaults: Sampling::default(),
        }
    }

    /// Makes a model from a node's description. Returns `None` if the model needs a tokenizer file.
    fn of_node(info: &ModelInfo) -> Option<Self> {
        let (tokenizer, template) = match tokenizer_of(info) {
            TOKENIZER_BYTES => (Tokenizer::Bytes, Some(ChatTemplate::plain())),
            TOKENIZER_NONE => (Tokenizer::Absent, None),
            _ => return None,
        };
        Some(Self {
            name: info.name.clone(),
            tokenizer: Arc::new(tokenizer),
            template,
            context_tokens: info.context_tokens,
            is_short: false,
            vocab: info.vocab,
            eos: info.eos_tokens.clone(),
            defaults: Sampling::default(),
        })
    }

    /// Limits the model to a node's abilities: a node may have less memory than the model's longest sequence
    /// needs.
    fn within(self, info: &ModelInfo) -> Self {
        Self {
            is_short: self.is_short || info.context_tokens < self.context_tokens,
            context_tokens: self.context_tokens.min(info.context_tokens),
            vocab: self.vocab.min(info.vocab),
            ..self
        }
    }

    /// Describes the longest sequence, for the text of refusals.
    pub(crate) fn context(&self) -> String {
        let tokens = self.context_tokens;
        if self.is_short {
            format!(
                "the {tokens} tokens for which all nodes of the model have memory (`model.kv_memory` there)"
            )
        } else {
            format!("the model's context of {tokens}")
        }
    }
}

fn tokenizer_of(info: &ModelInfo) -> &str {
    info.fingerprint.part(TOKENIZER).unwrap_or("absent")
}

/// The reason why the router cannot serve the model of a node.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LearnError {
    #[error("the router has no tokenizer for the model `{model}`: set `model.path` and `model.name` there")]
    NoTokenizer { model: String },
    #[error("the node's model differs from the router's: {0}")]
    Mismatch(FingerprintMismatch),
}

/// The models that this router serves, by name. Clones share one table.
#[derive(Clone, Debug, Default)]
pub struct RouterModels {
    /// The models by name. Every request reads the map; it is written when nodes join or leave. Never locked
    /// across an await.
    by_name: Arc<RwLock<BTreeMap<String, KnownModel>>>,
}

/// Where a model's description comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ModelSource {
    /// The router's configuration describes the model.
    Router,
    /// A node describes the model. Only the model's nodes know the longest sequence.
    Node,
}

#[derive(Clone, Debug)]
struct KnownModel {
    own: ServedModel,
    source: ModelSource,
    /// The model, limited to the abilities of its current nodes.
    fitted: Arc<ServedModel>,
}

impl RouterModels {
    pub fn new(models: impl IntoIterator<Item = ServedModel>) -> Self {
        let table = Self::default();
        models.into_iter().for_each(|model| table.insert(model, ModelSource::Router));
        table
    }

    /// Adds a node's model, unless a model with this name exists. Refuses it if the tokenizers differ,
    /// because token ids must mean the same on both sides.
    pub fn learn(&self, info: &ModelInfo) -> Result<(), LearnError> {
        let known = self.by_name.read().unwrap_or_else(PoisonError::into_inner).get(&info.name).cloned();
        if let Some(own) = known.as_ref().filter(|known| known.source == ModelSource::Router) {
            return agree(&own.own, info);
        }
        let learned = ServedModel::of_node(info);
        let learned = learned.ok_or_else(|| LearnError::NoTokenizer { model: info.name.clone() })?;
        if known.is_none() {
            self.insert(learned, ModelSource::Node);
        }
        Ok(())
    }

    /// Replaces a model that was learned from another node by this node's model, if they differ.
    pub fn replace_learned(&self, info: &ModelInfo) {
        let known = self.by_name.read().unwrap_or_else(PoisonError::into_inner).get(&info.name).cloned();
        let is_replaced = known.is_none_or(|known| {
            let own = &known.own;
            let is_same = agree(own, info).is_ok() && own.vocab == info.vocab && own.eos == info.eos_tokens;
            known.source == ModelSource::Node && !is_same
        });
        if let Some(learned) = ServedModel::of_node(info).filter(|_| is_replaced) {
            self.insert(learned, ModelSource::Node);
        }
    }

    /// Limits each model to the lengths that all of these nodes can serve, and removes earlier limits.
    pub fn fit<'a>(&self, nodes: impl Iterator<Item = &'a ModelInfo> + Clone) {
        let mut models = self.by_name.write().unwrap_or_else(PoisonError::into_inner);
        for (name, known) in models.iter_mut() {
            let its = || nodes.clone().filter(|info| info.name == *name);
            let longest = its().map(|info| info.context_tokens).max();
            if let (ModelSource::Node, Some(longest)) = (known.source, longest) {
                known.own.context_tokens = longest;
            }
            known.fitted = Arc::new(its().fold(known.own.clone(), ServedModel::within));
        }
    }

    /// Returns the model that a request names. A request without a name gets the only model, if there is just
    /// one.
    pub fn find(&self, name: Option<&str>) -> Result<Arc<ServedModel>, AcceptError> {
        let models = self.by_name.read().unwrap_or_else(PoisonError::into_inner);
        match name {
            Some(name) => {
                let known = models.get(name).map(|known| Arc::clone(&known.fitted));
                known.ok_or_else(|| AcceptError::UnknownModel { name: name.to_owned() })
            }
            None => match models.values().collect::<Vec<_>>().as_slice() {
                [only] => Ok(Arc::clone(&only.fitted)),
                _ => Err(AcceptError::missing("model")),
            },
        }
    }

    /// Returns the bytes of the prompts' pieces that each model keeps, if it keeps any.
    pub fn seen_bytes(&self) -> Vec<(String, usize)> {
        let models = self.by_name.read().unwrap_or_else(PoisonError::into_inner);
        let of_model =
            |(name, known): (&String, &KnownModel)| (name.clone(), known.own.tokenizer.seen_bytes());
        models.iter().map(of_model).filter(|(_, bytes)| *bytes > 0).collect()
    }

    fn insert(&self, own: ServedModel, source: ModelSource) {
        let mut models = self.by_name.write().unwrap_or_else(PoisonError::into_inner);
        let fitted = Arc::new(own.clone());
        models.insert(own.name.clone(), KnownModel { own, source, fitted });
    }
}

fn agree(model: &ServedModel, info: &ModelInfo) -> Result<(), LearnError> {
    let (ours, theirs) = (model.tokenizer.fingerprint(), tokenizer_of(info));
    if ours == theirs {
        return Ok(());
    }
    let difference = format!("{TOKENIZER}: {ours} here, {theirs} there");
    Err(LearnError::Mismatch(FingerprintMismatch(vec![difference])))
}

#[cfg(test)]
mod tests {
    use types::layout::KvDtype;
    use types::{Fingerprint, KvLayout};

    use super::*;

    fn models(names: &[&str]) -> RouterModels {
        RouterModels::new(names.iter().map(|name| ServedModel::mock(*name, 64)))
    }

    fn node(name: &str, tokenizer: &str) -> ModelInfo {
        ModelInfo {
            name: name.to_owned(),
            context_tokens: 32,
            vocab: 300,
            eos_tokens: vec![TokenId(7)],
            layout: KvLayout::uniform(16, KvDtype::F32, 1, 1, 4),
            fingerprint: Fingerprint::new([(TOKENIZER.to_owned(), tokenizer.to_owned())]),
        }
    }

    #[test]
    fn a_name_may_be_left_out_where_there_is_one_model() {
        assert_eq!(models(&["mock"]).find(None).expect("the only one").name, "mock");
        assert_eq!(models(&["a", "b"]).find(None).expect_err("which?"), AcceptError::missing("model"));
        assert_eq!(models(&["a", "b"]).find(Some("b")).expect("named").name, "b");
        assert_eq!(models(&["a"]).find(Some("z")).expect_err("unknown").param(), "model");
    }

    #[test]
    fn models_without_a_tokenizer_of_their_own_are_learned_from_their_nodes() {
        let models = RouterModels::default();
        models.learn(&node("mock", TOKENIZER_BYTES)).expect("bytes need nothing");
        models.learn(&node("ids", TOKENIZER_NONE)).expect("token ids need nothing");
        let (mock, ids) =
            (models.find(Some("mock")).expect("learned"), models.find(Some("ids")).expect("learned"));
        assert_eq!(
            (mock.context_tokens, mock.vocab, mock.eos.as_slice()),
            (32, 300, [TokenId(7)].as_slice())
        );
        assert!(mock.template.is_some() && ids.template.is_none());
        assert!(ids.tokenizer.encode("text").is_err());
        let error = models.learn(&node("real", "0123")).expect_err("its tokenizer is unknown");
        assert_eq!(error, LearnError::NoTokenizer { model: "real".to_owned() });
        assert!(models.find(Some("real")).is_err());
    }

    #[test]
    fn a_known_model_keeps_within_what_its_nodes_can_do() {
        let models = models(&["mock"]);
        let (small, other) = (node("mock", TOKENIZER_BYTES), node("other", TOKENIZER_BYTES));
        let smaller = ModelInfo { context_tokens: 16, ..small.clone() };
        let fitted = |nodes: &[&ModelInfo]| {
            nodes.iter().for_each(|info| models.learn(info).expect("the same tokenizer"));
            models.fit(nodes.iter().copied());
            let mock = models.find(Some("mock")).expect("known");
            (mock.context_tokens, mock.vocab)
        };
        assert_eq!(fitted(&[&small]), (32, 261));
        assert_eq!(fitted(&[&small, &smaller, &other]), (16, 261));
        assert_eq!(fitted(&[&small, &other]), (32, 261), "the smaller one has left");
        assert_eq!(fitted(&[&other]), (64, 261), "so has the other");
    }

    #[test]
    fn a_learned_model_is_as_long_as_its_nodes_of_now() {
        let models = RouterModels::default();
        let small = node("mock", TOKENIZER_BYTES);
        models.learn(&small).expect("bytes need nothing");
        let large = ModelInfo { context_tokens: 1024, ..small.clone() };
        let fitted = |nodes: &[&ModelInfo]| {
            models.fit(nodes.iter().copied());
            let mock = models.find(None).expect("known");
            (mock.context_tokens, mock.context())
        };
        assert_eq!(fitted(&[&small]), (32, "the model's context of 32".to_owned()));
        let (tokens, context) = fitted(&[&large, &small]);
        assert_eq!(tokens, 32);
        assert!(context.starts_with("the 32 tokens for which all nodes"), "{context}");
        assert_eq!(fitted(&[&large]).0, 1024, "the node that was there first has left");
    }

    #[test]
    fn a_learned_model_is_the_one_of_the_nodes_in_force() {
        let models = RouterModels::default();
        models.learn(&node("mock", TOKENIZER_NONE)).expect("token ids need nothing");
        models.learn(&node("mock", TOKENIZER_BYTES)).expect("the group in force is not chosen yet");
        assert!(models.find(None).expect("learned").template.is_none());
        models.replace_learned(&node("mock", TOKENIZER_BYTES));
        assert!(models.find(None).expect("learned").template.is_some());
    }

    #[test]
    fn another_tokenizer_under_the_same_name_is_spelled_out() {
        let models = models(&["mock"]);
        let error = models.learn(&node("mock", "0123")).expect_err("they would number tokens differently");
        let expected =
            "the node's model differs from the router's: models differ: tokenizer: bytes here, 0123 there";
        assert_eq!(error.to_string(), expected);
        assert_eq!(models.find(None).expect("known").context_tokens, 64, "nothing was learned");
    }
}

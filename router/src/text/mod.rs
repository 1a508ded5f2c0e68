//! Text, which only the router knows: from messages to tokens, and from tokens back to whole characters.

pub mod detokenizer;
pub mod stop;
pub mod template;
pub mod tokenizer;

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};

use types::{ModelInfo, Sampling, TokenId};

pub use detokenizer::Detokenizer;
pub use stop::StopStrings;
pub use template::{Chat, ChatTemplate};
pub use tokenizer::Tokenizer;

use crate::error::{AcceptError, TextError};

/// What the router must know of a model to speak for it. The nodes know the rest.
#[derive(Debug)]
pub struct RouterModel {
    pub name: String,
    pub tokenizer: Arc<Tokenizer>,
    /// `None`: completions only.
    pub template: Option<ChatTemplate>,
    /// The longest sequence, prompt and output together.
    pub context_tokens: u32,
    /// Tokens are numbered below this. A model may have more of them than its tokenizer writes.
    pub vocab: u32,
    /// The tokens with which the model ends its answers.
    pub eos: Vec<TokenId>,
    /// How to sample for a request that does not say. Real models bring their own wishes (`generation_config.json`).
    pub defaults: Sampling,
}

impl RouterModel {
    /// The text half of the mock backend: a token is a byte, and the answer to a prompt is a function of the prompt.
    pub fn mock(name: impl Into<String>, context_tokens: u32) -> Result<Self, TextError> {
        Ok(Self {
            name: name.into(),
            tokenizer: Arc::new(Tokenizer::Bytes),
            template: Some(ChatTemplate::plain()?),
            context_tokens,
            vocab: Tokenizer::Bytes.vocab(),
            eos: vec![tokenizer::END],
            defaults: Sampling::default(),
        })
    }
}

/// The models that this router speaks for, by name. Clones share one table.
#[derive(Clone, Debug, Default)]
pub struct RouterModels {
    /// Read by every request and written when a node joins; never held across an await.
    by_name: Arc<RwLock<BTreeMap<String, Arc<RouterModel>>>>,
}

impl RouterModels {
    pub fn new(models: impl IntoIterator<Item = RouterModel>) -> Self {
        let table = Self::default();
        models.into_iter().for_each(|model| table.insert(model));
        table
    }

    /// Speaks for a node's model from now on, if its text half needs nothing but what the node says of itself.
    pub fn learn(&self, info: &ModelInfo) -> Result<(), TextError> {
        let speaks_bytes = info.fingerprint.parts().any(|part| part == ("tokenizer", "bytes"));
        if speaks_bytes && self.find(Some(&info.name)).is_err() {
            let mock = RouterModel::mock(info.name.clone(), info.context_tokens)?;
            self.insert(RouterModel { vocab: info.vocab, eos: info.eos_tokens.clone(), ..mock });
        }
        Ok(())
    }

    /// The model that a request names. A request that names none means the only one there is.
    pub fn find(&self, name: Option<&str>) -> Result<Arc<RouterModel>, AcceptError> {
        let models = self.by_name.read().unwrap_or_else(PoisonError::into_inner);
        match name {
            Some(name) => {
                models.get(name).cloned().ok_or_else(|| AcceptError::UnknownModel { name: name.to_owned() })
            }
            None if models.len() == 1 => Ok(models.values().next().cloned().expect("there is one")),
            None => Err(AcceptError::missing("model")),
        }
    }

    fn insert(&self, model: RouterModel) {
        let mut models = self.by_name.write().unwrap_or_else(PoisonError::into_inner);
        models.insert(model.name.clone(), Arc::new(model));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn models(names: &[&str]) -> RouterModels {
        RouterModels::new(
            names.iter().map(|name| RouterModel::mock(*name, 64).expect("the plain template compiles")),
        )
    }

    #[test]
    fn a_name_may_be_left_out_where_there_is_one_model() {
        assert_eq!(models(&["mock"]).find(None).expect("the only one").name, "mock");
        assert_eq!(models(&["a", "b"]).find(None).expect_err("which?"), AcceptError::missing("model"));
        assert_eq!(models(&["a", "b"]).find(Some("b")).expect("named").name, "b");
        assert_eq!(models(&["a"]).find(Some("z")).expect_err("unknown").param(), "model");
    }
}

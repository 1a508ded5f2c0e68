//! Chats: messages and tools become a prompt, and rules that divide its answers. Both APIs use it.
//!
//! Messages and tools are JSON in OpenAI's form, because the chat templates of models read that form.

pub(crate) mod messages;
pub(crate) mod tools;

use std::sync::Arc;

use chassis::World;
use minijinja::value::{Serde, Value as TemplateValue};
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::accept::{AskedInputs, AskedPrompt, SamplingParams};
use crate::answers::AskedRequest;
use crate::error::AcceptError;
use crate::grammars::AskedGrammar;
use crate::text::parts::{PartsRules, ToolRules};
use crate::text::reasoning::{ReasoningRules, ReasoningTags};
use crate::text::{Chat, ChatTemplate, PromptText, ServedModel};
use tools::Tools;

/// The mark behind the last message's text, where a rendered chat is cut for an answer that continues this text. Its space
/// shows whether the template keeps spaces at the end of a text.
const END_OF_TEXT: &str = "BATON_END_OF_LAST_TEXT ";

/// A chat as its client wrote it, unchecked.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct ChatRequest {
    pub(crate) messages: Option<Vec<Map<String, Value>>>,
    pub(crate) tools: Option<Vec<Value>>,
    pub(crate) tool_choice: Option<Value>,
    pub(crate) parallel_tool_calls: Option<bool>,
    pub(crate) include_reasoning: Option<bool>,
    pub(crate) separate_reasoning: Option<bool>,
    pub(crate) add_generation_prompt: Option<bool>,
    /// Whether the answer continues the last message. Then nothing opens a new one.
    pub(crate) continue_final_message: Option<bool>,
    pub(crate) chat_template_kwargs: Option<Map<String, Value>>,
}

/// A chat as the model reads it.
#[derive(Debug)]
pub(crate) struct RenderedChat {
    pub(crate) text: PromptText,
    /// How the answers are divided.
    parts: PartsRules,
    /// The reasoning before the answers; `None`: the model does not reason.
    reasoning: Option<ReasoningRules>,
    demanded: Option<DemandedCalls>,
}

/// The calls that a client demands of an answer.
#[derive(Debug)]
struct DemandedCalls {
    grammar: AskedGrammar,
    /// Whether the client names one function.
    is_named: bool,
}

impl ChatRequest {
    /// Renders the chat with the model's template.
    pub(crate) fn rendered(
        mut self,
        world: &World,
        model: &ServedModel,
    ) -> Result<RenderedChat, AcceptError> {
        let Some(template) = &model.template else {
            let reason = "the model has no chat template: send the prompt as a text or token ids";
            return Err(AcceptError::unsupported("messages", reason));
        };
        let mut tools = tools::callable(self.tools.take(), self.tool_choice.as_ref())?;
        let tool_rules = tools.as_ref().map(|tools| self.tool_rules(world, template, tools)).transpose()?;
        let demand = tools.as_mut().and_then(|tools| tools.demand.take());
        let included = self.include_reasoning.unwrap_or(true);
        let is_separate = self.separate_reasoning.unwrap_or(true);
        let continues = self.continues();
        let text = template.render(self.chat(world, template, tools)?)?;
        let text = if continues { cut_behind_last_text(text)? } else { text };
        let opened = |tags: ReasoningTags| tags.opened_by(&text);
        let reasoning =
            template.reasoning().map(|tags| ReasoningRules { tags, opened: opened(tags), included });
        // A continued message has more reasoning only if its text ends inside its reasoning.
        let reasoning = reasoning.filter(|rules| rules.opened || !continues);
        let demanded = match (&demand, &tool_rules) {
            (Some(demand), Some(rules)) => {
                let grammar = demand.grammar(model, rules, reasoning)?;
                Some(DemandedCalls { grammar, is_named: demand.is_named })
            }
            _ => None,
        };
        let parts = PartsRules { reasoning: reasoning.filter(|_| is_separate), tools: tool_rules };
        Ok(RenderedChat { text: PromptText::Rendered(text), parts, reasoning, demanded })
    }

    fn continues(&self) -> bool {
        self.continue_final_message.unwrap_or(false)
    }

    fn tool_rules(
        &self,
        world: &World,
        template: &ChatTemplate,
        tools: &Tools,
    ) -> Result<ToolRules, AcceptError> {
        let format = template.tool_format().ok_or_else(|| {
            let reason = "the model's chat template does not show how the model calls tools: the setting \
                          `model.tool_format` names it";
            AcceptError::unsupported("tools", reason)
        })?;
        let calls_max = if self.parallel_tool_calls.unwrap_or(true) { usize::MAX } else { 1 };
        Ok(ToolRules { format, tools: Arc::clone(&tools.set), calls_max, seed: world.draw() })
    }

    fn chat(self, world: &World, template: &ChatTemplate, tools: Option<Tools>) -> Result<Chat, AcceptError> {
        let continues = self.continues();
        let messages = self.messages.ok_or_else(|| AcceptError::missing("messages"))?;
        let mut messages = messages::checked(messages, template.arguments())?;
        if continues && self.add_generation_prompt == Some(true) {
            return Err(not_continued("`add_generation_prompt` begins a new message"));
        }
        if let Some(last) = messages.last_mut().filter(|_| continues) {
            mark_end(last)?;
        }
        let variables = self.chat_template_kwargs.into_iter().flatten();
        Ok(Chat {
            messages: Serde(messages).into(),
            tools: tools.map_or(TemplateValue::from(()), |tools| Serde(tools.fields).into()),
            variables: variables.map(|(name, value)| (name, TemplateValue::from(Serde(value)))).collect(),
            add_generation_prompt: self.add_generation_prompt.unwrap_or(!continues),
            unix_seconds: world.unix_time().as_secs() as i64,
        })
    }
}

fn mark_end(last: &mut Value) -> Result<(), AcceptError> {
    match last {
        Value::Object(message) if message.contains_key("tool_calls") => {
            Err(not_continued("the last message calls tools"))
        }
        _ => {
            let text = last["content"].as_str().unwrap_or_default();
            last["content"] = format!("{text}{END_OF_TEXT}").into();
            Ok(())
        }
    }
}

/// Cuts a rendered chat at the mark behind its last text, as `transformers` does.
fn cut_behind_last_text(mut text: String) -> Result<String, AcceptError> {
    let Some(end) = text.rfind(END_OF_TEXT.trim_end()) else {
        return Err(not_continued("the model's chat template does not write the last message's text"));
    };
    let keeps_spaces = text[end..].starts_with(END_OF_TEXT);
    text.truncate(end);
    if !keeps_spaces {
        text.truncate(text.trim_end().len());
    }
    Ok(text)
}

fn not_continued(reason: &str) -> AcceptError {
    AcceptError::invalid("continue_final_message", reason)
}

impl RenderedChat {
    /// Returns whether the client demands a call of one named function.
    pub(crate) fn names_call(&self) -> bool {
        self.demanded.as_ref().is_some_and(|demanded| demanded.is_named)
    }

    /// Makes the request for answers to the chat. Refuses a grammar of the client beside that of demanded calls. The
    /// client's grammar applies after the model's reasoning.
    pub(crate) fn asked(
        self,
        model: Arc<ServedModel>,
        mut params: SamplingParams,
    ) -> Result<AskedRequest, AcceptError> {
        if let Some(reasoning) = &self.reasoning {
            let after = |asked: AskedGrammar| asked.after_reasoning(reasoning, &model.tokenizer);
            params.grammar = params.grammar.map(after);
        }
        if let Some(DemandedCalls { grammar, .. }) = self.demanded
            && let Some(other) = params.grammar.replace(grammar)
        {
            let reason = format!("an answer has one grammar, and `{}` is one already", other.param);
            return Err(AcceptError::invalid("tool_choice", reason));
        }
        let inputs = AskedInputs { param: "messages", prompts: vec![AskedPrompt::Text(self.text)] };
        Ok(AskedRequest { model, inputs, params, parts: Some(self.parts) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chat_is_cut_behind_its_last_text() {
        for (rendered, expected) in [
            (
                "<user>Hi<end><assistant>Sure, BATON_END_OF_LAST_TEXT <end>",
                Some("<user>Hi<end><assistant>Sure, "),
            ),
            // The template removes spaces at the end of a text.
            ("<assistant>Sure, BATON_END_OF_LAST_TEXT<end>", Some("<assistant>Sure,")),
            ("<assistant>BATON_END_OF_LAST_TEXT <end>", Some("<assistant>")),
            (
                "<user>BATON_END_OF_LAST_TEXT <end><assistant>aBATON_END_OF_LAST_TEXT ",
                Some("<user>BATON_END_OF_LAST_TEXT <end><assistant>a"),
            ),
            ("<user>Hi<end>", None),
        ] {
            assert_eq!(cut_behind_last_text(rendered.to_owned()).ok().as_deref(), expected, "{rendered}");
        }
    }
}

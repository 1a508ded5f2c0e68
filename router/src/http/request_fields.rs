//! The table of request fields that clients of OpenAI, vLLM and SGLang send, with Baton's support for each.
//!
//! A field that would change the answer and is not supported is refused by name; ignoring it would give a wrong answer
//! with status 200. A field that is not in the table is refused too, with the nearest name. `docs/api.md` is generated
//! from this table.

use serde_json::{Map, Value};

use super::body::JsonBody;
use crate::error::AcceptError;
use crate::upstream::fields::WrittenField;

/// The endpoint that a request is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Endpoint {
    Chat,
    Completions,
}

/// The endpoints that accept a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FieldEndpoints {
    Chat,
    Completions,
    Both,
}

/// How Baton treats a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FieldSupport {
    /// The field is supported. The text describes restrictions.
    Honoured(&'static str),
    /// The field is ignored, because it does not change the answer. The text is the reason.
    Harmless(&'static str),
    /// The field is refused, because it would change the answer. Values that change nothing are accepted:
    /// `null`, `false`, an empty string, list or object, and the JSON values in `neutral`.
    Refused { reason: &'static str, neutral: &'static [&'static str] },
}

/// One row of the table of fields.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestField {
    pub(crate) name: &'static str,
    pub(crate) on: FieldEndpoints,
    pub(crate) fate: FieldSupport,
}

const fn honoured(name: &'static str, on: FieldEndpoints, note: &'static str) -> RequestField {
    RequestField { name, on, fate: FieldSupport::Honoured(note) }
}

const fn harmless(name: &'static str, note: &'static str) -> RequestField {
    RequestField { name, on: FieldEndpoints::Both, fate: FieldSupport::Harmless(note) }
}

const fn refused(name: &'static str, reason: &'static str) -> RequestField {
    RequestField { name, on: FieldEndpoints::Both, fate: FieldSupport::Refused { reason, neutral: &[] } }
}

const fn neutral(
    name: &'static str,
    on: FieldEndpoints,
    neutral: &'static [&'static str],
    reason: &'static str,
) -> RequestField {
    RequestField { name, on, fate: FieldSupport::Refused { reason, neutral } }
}

const ONE_GRAMMAR: &str = "one grammar of an answer";
const NOT_WITH_GRAMMAR: &str = "not with a grammar";
const PROMPT_LOGPROBS: &str = "without `stream` and cached KV";
const LARK: &str = "one grammar of an answer, in the language of Lark";
const USE_TOOLS: &str = "use `tools` of /v1/chat/completions";
const NO_MEDIA: &str = "text is the only input and output";
const ONE_BEAM: &str = "answers are sampled, without beam search";
const RENDERING: &str = "it is read only where prompts are rendered and not answered";
const SPECIAL: &str = "special tokens are always left out of the text";

/// The table of fields, by support and name.
pub(crate) const FIELDS: &[RequestField] = &[
    honoured("add_generation_prompt", FieldEndpoints::Chat, ""),
    honoured("best_of", FieldEndpoints::Both, "it must equal `n`"),
    honoured("cache_salt", FieldEndpoints::Both, "only requests with the same salt share cached KV"),
    honoured("chat_template_kwargs", FieldEndpoints::Chat, ""),
    honoured("continue_final_message", FieldEndpoints::Chat, ""),
    honoured(
        "echo",
        FieldEndpoints::Completions,
        "with `logprobs` also of the prompt; `max_tokens` may be 0",
    ),
    honoured("frequency_penalty", FieldEndpoints::Both, ""),
    honoured("guided_choice", FieldEndpoints::Both, ONE_GRAMMAR),
    honoured("guided_grammar", FieldEndpoints::Both, LARK),
    honoured("guided_json", FieldEndpoints::Both, ONE_GRAMMAR),
    honoured("guided_json_object", FieldEndpoints::Both, ONE_GRAMMAR),
    honoured("guided_regex", FieldEndpoints::Both, ONE_GRAMMAR),
    honoured("ignore_eos", FieldEndpoints::Both, NOT_WITH_GRAMMAR),
    honoured("json_schema", FieldEndpoints::Both, ONE_GRAMMAR),
    honoured("include_reasoning", FieldEndpoints::Chat, ""),
    honoured("logit_bias", FieldEndpoints::Both, ""),
    honoured("logprobs", FieldEndpoints::Both, ""),
    honoured("max_completion_tokens", FieldEndpoints::Chat, ""),
    honoured("max_tokens", FieldEndpoints::Both, ""),
    honoured("messages", FieldEndpoints::Chat, "texts, or lists of text parts; tool calls and their results"),
    honoured("min_p", FieldEndpoints::Both, ""),
    honoured("min_tokens", FieldEndpoints::Both, NOT_WITH_GRAMMAR),
    honoured("model", FieldEndpoints::Both, ""),
    honoured("n", FieldEndpoints::Both, ""),
    honoured("parallel_tool_calls", FieldEndpoints::Chat, "`false` keeps the first call"),
    honoured("presence_penalty", FieldEndpoints::Both, ""),
    honoured("prompt", FieldEndpoints::Completions, "texts or token ids, one prompt or several"),
    honoured("prompt_logprobs", FieldEndpoints::Both, PROMPT_LOGPROBS),
    honoured("regex", FieldEndpoints::Both, ONE_GRAMMAR),
    honoured("repetition_penalty", FieldEndpoints::Both, ""),
    honoured(
        "response_format",
        FieldEndpoints::Both,
        "`text`, `json_object`, and `json_schema`, which is enforced with and without `strict`",
    ),
    honoured("return_token_ids", FieldEndpoints::Both, ""),
    honoured("separate_reasoning", FieldEndpoints::Chat, "`false` leaves reasoning in the text"),
    honoured("seed", FieldEndpoints::Both, ""),
    honoured("stop", FieldEndpoints::Both, ""),
    honoured("stop_token_ids", FieldEndpoints::Both, ""),
    honoured("stream", FieldEndpoints::Both, ""),
    honoured(
        "stream_options",
        FieldEndpoints::Both,
        "`include_usage`, and with it `continuous_usage_stats`; others are refused by name",
    ),
    honoured(
        "structured_outputs",
        FieldEndpoints::Both,
        "one of `json`, `json_object`, `regex`, `choice` and `grammar` (Lark); others are refused by name",
    ),
    honoured("temperature", FieldEndpoints::Both, ""),
    honoured(
        "tool_choice",
        FieldEndpoints::Chat,
        "`auto`; `none`, which leaves the tools out of the prompt; `required` and a named function, by a grammar",
    ),
    honoured("tools", FieldEndpoints::Chat, "functions"),
    honoured("top_k", FieldEndpoints::Both, ""),
    honoured("top_logprobs", FieldEndpoints::Chat, ""),
    honoured("top_p", FieldEndpoints::Both, ""),
    harmless("guided_decoding_backend", "there is one"),
    harmless("metadata", "a note of the client's"),
    harmless("prediction", "a hint for speed"),
    harmless("priority", "the header `x-baton-priority` is honoured"),
    harmless("prompt_cache_key", "a hint for speed"),
    harmless("prompt_cache_options", "a hint for speed"),
    harmless("prompt_cache_retention", "a hint for speed"),
    harmless("request_id", "the header `x-request-id` is honoured"),
    harmless("return_mm_kwargs", RENDERING),
    harmless("return_token_offsets", RENDERING),
    harmless("rid", "the header `x-request-id` is honoured"),
    harmless("safety_identifier", "a note of the client's"),
    harmless("service_tier", "there is one"),
    harmless("session_id", "a hint for speed"),
    harmless("store", "nothing is stored"),
    harmless("stream_interval", "each event has the tokens of one step"),
    harmless("stream_reasoning", "reasoning is streamed as it comes"),
    harmless("truncation_side", "`truncate_prompt_tokens` is refused, so no prompt is cut"),
    harmless("user", "a note of the client's"),
    neutral("add_special_tokens", FieldEndpoints::Chat, &[], "the chat template writes them"),
    neutral(
        "add_special_tokens",
        FieldEndpoints::Completions,
        &["true"],
        "the tokenizer's own are always added",
    ),
    refused("allowed_token_ids", "use logit_bias"),
    refused("audio", NO_MEDIA),
    refused("bad_words", "use logit_bias"),
    refused("bootstrap_host", "Baton hands KV over by itself"),
    refused("bootstrap_port", "Baton hands KV over by itself"),
    refused("bootstrap_room", "Baton hands KV over by itself"),
    refused("chat_template", "the model's own is used"),
    refused("custom_logit_processor", "code of clients is not run"),
    refused("custom_params", "code of clients is not run"),
    refused("data_parallel_rank", "the router chooses the nodes"),
    neutral("detokenize", FieldEndpoints::Both, &["true"], "answers are text; return_token_ids adds the ids"),
    refused("documents", "write them into the messages"),
    refused("early_stopping", ONE_BEAM),
    refused("ebnf", "use `guided_grammar`, in the language of Lark"),
    refused("ec_transfer_params", NO_MEDIA),
    neutral("echo", FieldEndpoints::Chat, &[], "only for /v1/completions"),
    refused("extra_key", "use `cache_salt` to keep prefix caches apart"),
    neutral("function_call", FieldEndpoints::Both, &["\"none\"", "\"auto\""], USE_TOOLS),
    refused("functions", USE_TOOLS),
    refused(
        "guided_whitespace_pattern",
        "between two tokens JSON has a space, or a line break with at most 32 characters of indentation",
    ),
    refused("include_stop_str_in_output", "an answer ends before its stop string"),
    refused("input_embeds", "prompts are text or token ids"),
    refused("kv_transfer_params", "Baton hands KV over by itself"),
    neutral("length_penalty", FieldEndpoints::Both, &["1", "1.0"], ONE_BEAM),
    refused("logits_processors", "code of clients is not run"),
    refused("logprob_token_ids", "the most likely tokens have logprobs"),
    refused("lora_path", "adapters are not served"),
    refused("media_io_kwargs", NO_MEDIA),
    refused("mm_processor_kwargs", NO_MEDIA),
    neutral("modalities", FieldEndpoints::Both, &["[\"text\"]"], NO_MEDIA),
    refused("moderation", "answers are not moderated"),
    refused("no_stop_trim", "an answer ends before its stop string"),
    refused("prompt_embeds", "prompts are text or token ids"),
    neutral(
        "reasoning_effort",
        FieldEndpoints::Both,
        &["\"none\""],
        "use chat_template_kwargs, as the model's template reads it",
    ),
    refused("repetition_detection", "answers end by stop strings, tokens and length"),
    refused("return_hidden_states", "hidden states stay on the nodes"),
    refused("return_prompt_text", "return_token_ids adds the ids"),
    refused("return_tokens_as_token_ids", "return_token_ids adds the ids"),
    neutral(
        "routed_experts_prompt_start",
        FieldEndpoints::Both,
        &["0"],
        "choices of experts stay on the nodes",
    ),
    refused("session_params", "there are no sessions; prefix caches are found by content"),
    neutral("skip_special_tokens", FieldEndpoints::Both, &["true"], SPECIAL),
    neutral("spaces_between_special_tokens", FieldEndpoints::Both, &["true"], SPECIAL),
    refused("stop_regex", "use stop"),
    refused("structural_tag", "use `structured_outputs.grammar`"),
    refused("suffix", "text is only continued at its end"),
    refused("thinking_token_budget", "reasoning has no limit of its own"),
    neutral("tool_choice", FieldEndpoints::Completions, &["\"none\"", "\"auto\""], USE_TOOLS),
    neutral("tools", FieldEndpoints::Completions, &[], USE_TOOLS),
    neutral("truncate_prompt_tokens", FieldEndpoints::Both, &[], "a prompt that is too long is refused"),
    neutral("truncation", FieldEndpoints::Both, &["\"disabled\""], "a prompt that is too long is refused"),
    refused("use_beam_search", ONE_BEAM),
    neutral("verbosity", FieldEndpoints::Both, &["\"medium\""], "write it into the messages"),
    refused("vllm_xargs", "code of clients is not run"),
    refused("watermarking", "answers have no watermark"),
    refused("web_search_options", "nothing is searched"),
];

/// Refuses a request with a field that is unknown, or that would change the answer and is not supported: of several the
/// first by name. A body that is not an object is accepted here, because the parser of the fields reports it.
pub(crate) fn check(endpoint: Endpoint, body: &JsonBody<'_>) -> Result<(), AcceptError> {
    let refused =
        body.fields().iter().filter_map(|field| refusal(endpoint, field).map(|error| (&field.name, error)));
    match refused.min_by(|(a, _), (b, _)| a.cmp(b)) {
        Some((_, error)) => Err(error),
        None => Ok(()),
    }
}

/// Returns why a field is refused.
fn refusal(endpoint: Endpoint, field: &WrittenField<'_>) -> Option<AcceptError> {
    let WrittenField { name, value } = field;
    let reason = match known(endpoint, name).map(|field| field.fate) {
        Some(FieldSupport::Honoured(_) | FieldSupport::Harmless(_)) => return None,
        Some(FieldSupport::Refused { reason, neutral }) => {
            let is_neutral =
                serde_json::from_slice(value).is_ok_and(|value| changes_nothing(&value, neutral));
            (!is_neutral).then(|| reason.to_owned())
        }
        None => (*value != b"null").then(|| unknown(endpoint, name)),
    };
    Some(AcceptError::unsupported(name.to_string(), reason?))
}

fn known(endpoint: Endpoint, name: &str) -> Option<&'static RequestField> {
    FIELDS.iter().find(|field| field.name == name && field.on.includes(endpoint))
}

impl FieldEndpoints {
    pub(crate) fn includes(self, endpoint: Endpoint) -> bool {
        match self {
            Self::Both => true,
            Self::Chat => endpoint == Endpoint::Chat,
            Self::Completions => endpoint == Endpoint::Completions,
        }
    }
}

/// Refuses fields that are not `known` and would change the answer, for endpoints that are not in the table.
pub(super) fn refuse_others(others: &Map<String, Value>, known: &[&str]) -> Result<(), AcceptError> {
    let wrong =
        |(name, value): &(&String, &Value)| !known.contains(&name.as_str()) && !changes_nothing(value, &[]);
    match others.iter().find(wrong) {
        Some((name, _)) => Err(AcceptError::unsupported(name.clone(), "this endpoint does not have it")),
        None => Ok(()),
    }
}

fn changes_nothing(value: &Value, neutral: &[&str]) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(text) if text.is_empty() => true,
        Value::Array(items) if items.is_empty() => true,
        Value::Object(fields) if fields.is_empty() => true,
        value => neutral.contains(&value.to_string().as_str()),
    }
}

/// The similarity below which no name is suggested for an unknown field.
const LIKENESS_MIN: f64 = 0.85;

fn unknown(endpoint: Endpoint, name: &str) -> String {
    let likeness = |field: &&RequestField| strsim::jaro_winkler(name, field.name);
    let ours = FIELDS.iter().filter(|field| field.on.includes(endpoint));
    let nearest = ours.max_by(|a, b| likeness(a).total_cmp(&likeness(b)));
    match nearest.filter(|field| likeness(field) >= LIKENESS_MIN) {
        Some(field) => format!("there is no such field, did you mean `{}`?", field.name),
        None => "there is no such field".to_owned(),
    }
}

#[cfg(test)]
mod tests;

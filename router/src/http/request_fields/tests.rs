use std::fmt::Write as _;
use std::path::Path;

use serde_json::json;

use super::*;
use crate::http::error::HttpError;

/// The fields of chat completions in OpenAI's official client (2.x).
const OPENAI_CHAT: &[&str] = &[
    "messages",
    "model",
    "audio",
    "frequency_penalty",
    "function_call",
    "functions",
    "logit_bias",
    "logprobs",
    "max_completion_tokens",
    "max_tokens",
    "metadata",
    "modalities",
    "moderation",
    "n",
    "parallel_tool_calls",
    "prediction",
    "presence_penalty",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "reasoning_effort",
    "response_format",
    "safety_identifier",
    "seed",
    "service_tier",
    "stop",
    "store",
    "stream_options",
    "temperature",
    "tool_choice",
    "tools",
    "top_logprobs",
    "top_p",
    "user",
    "verbosity",
    "web_search_options",
    "stream",
];
const OPENAI_COMPLETIONS: &[&str] = &[
    "model",
    "prompt",
    "best_of",
    "echo",
    "frequency_penalty",
    "logit_bias",
    "logprobs",
    "max_tokens",
    "n",
    "presence_penalty",
    "seed",
    "stop",
    "stream_options",
    "suffix",
    "temperature",
    "top_p",
    "user",
    "stream",
];

/// The fields that both vLLM's `ChatCompletionRequest` and its `CompletionRequest` have
/// (`vllm/entrypoints/openai/*/protocol.py` at commit 002032ee2b).
const VLLM_BOTH: &[&str] = &[
    "model",
    "frequency_penalty",
    "logit_bias",
    "logprobs",
    "max_tokens",
    "n",
    "presence_penalty",
    "response_format",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "temperature",
    "top_p",
    "thinking_token_budget",
    "user",
    "use_beam_search",
    "top_k",
    "min_p",
    "repetition_penalty",
    "watermarking",
    "length_penalty",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
    "truncation_side",
    "prompt_logprobs",
    "logprob_token_ids",
    "allowed_token_ids",
    "bad_words",
    "echo",
    "add_special_tokens",
    "structured_outputs",
    "priority",
    "request_id",
    "session_id",
    "return_tokens_as_token_ids",
    "return_token_ids",
    "routed_experts_prompt_start",
    "return_token_offsets",
    "return_mm_kwargs",
    "cache_salt",
    "kv_transfer_params",
    "ec_transfer_params",
    "vllm_xargs",
    "repetition_detection",
    "stream_interval",
];
const VLLM_CHAT: &[&str] = &[
    "messages",
    "top_logprobs",
    "max_completion_tokens",
    "tools",
    "tool_choice",
    "reasoning_effort",
    "include_reasoning",
    "parallel_tool_calls",
    "add_generation_prompt",
    "continue_final_message",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "return_prompt_text",
];
const VLLM_COMPLETIONS: &[&str] = &["prompt", "suffix", "prompt_embeds"];
/// Fields that earlier versions of vLLM had.
const VLLM_EARLIER: &[&str] = &[
    "best_of",
    "guided_choice",
    "guided_decoding_backend",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "guided_whitespace_pattern",
    "logits_processors",
];

fn refusal(endpoint: Endpoint, body: &Value) -> Option<(String, String)> {
    let error = HttpError::from(check(endpoint, &JsonBody::of(body.to_string().as_bytes())).err()?);
    Some((error.param.clone().expect("a field"), error.message.clone()))
}

#[test]
fn every_field_of_the_official_client_is_known() {
    for (endpoint, fields) in [(Endpoint::Chat, OPENAI_CHAT), (Endpoint::Completions, OPENAI_COMPLETIONS)] {
        for name in fields {
            assert!(known(endpoint, name).is_some(), "{name}");
        }
    }
}

#[test]
fn every_field_of_vllm_is_known() {
    let chat = VLLM_BOTH.iter().chain(VLLM_CHAT).chain(VLLM_EARLIER);
    let completions = VLLM_BOTH.iter().chain(VLLM_COMPLETIONS).chain(VLLM_EARLIER);
    let fields = chat.map(|name| (Endpoint::Chat, name));
    let missing: Vec<_> = fields
        .chain(completions.map(|name| (Endpoint::Completions, name)))
        .filter(|(endpoint, name)| known(*endpoint, name).is_none())
        .collect();
    assert!(missing.is_empty(), "{missing:?}");
}

#[test]
fn a_field_is_in_the_table_once() {
    for (nth, field) in FIELDS.iter().enumerate() {
        for other in &FIELDS[..nth] {
            let overlap =
                field.on == other.on || field.on == FieldEndpoints::Both || other.on == FieldEndpoints::Both;
            assert!(field.name != other.name || !overlap, "{}", field.name);
        }
    }
}

#[test]
fn every_field_has_the_fate_that_the_table_says() {
    let deep = (0..200).fold(json!("something"), |inner, _| json!([inner]));
    let something = [json!("something"), json!({"a": 1}), json!(["a"]), json!(7), json!(true), deep];
    for field in FIELDS {
        for endpoint in [Endpoint::Chat, Endpoint::Completions] {
            if !field.on.includes(endpoint) {
                continue;
            }
            assert_eq!(refusal(endpoint, &json!({field.name: null})), None, "{}", field.name);
            let FieldSupport::Refused { reason, neutral } = field.fate else {
                for value in &something {
                    assert_eq!(refusal(endpoint, &json!({field.name: value})), None, "{}", field.name);
                }
                continue;
            };
            for value in something.iter().filter(|value| !neutral.contains(&&*value.to_string())) {
                let (param, message) = refusal(endpoint, &json!({field.name: value})).expect(field.name);
                assert_eq!(param, field.name);
                assert!(message.contains(reason), "{message}");
            }
            let empty = [json!(false), json!(""), json!([]), json!({})];
            let neutral = neutral.iter().map(|text| serde_json::from_str(text).expect("JSON"));
            for value in empty.into_iter().chain(neutral) {
                assert_eq!(refusal(endpoint, &json!({field.name: value})), None, "{}", field.name);
            }
        }
    }
}

#[test]
fn an_unknown_field_is_refused_with_the_nearest_name() {
    for (name, expected) in [
        ("temprature", "there is no such field, did you mean `temperature`?"),
        ("max_token", "there is no such field, did you mean `max_tokens`?"),
        ("zzz", "there is no such field"),
    ] {
        let (param, message) = refusal(Endpoint::Chat, &json!({name: 1})).expect(name);
        assert_eq!(param, name);
        assert!(message.ends_with(expected), "{message}");
        assert_eq!(refusal(Endpoint::Chat, &json!({name: null})), None, "null is no value");
    }
}

const HEAD: &str = "\
# The API

`UPDATE_DOCS=1 cargo test -p baton-router the_page_lists_every_field` makes the table of fields.

## Endpoints

| port | endpoint | what |
|---|---|---|
| router, HTTP | `POST /v1/chat/completions`, `POST /v1/completions` | answers, whole or as server-sent events |
| router, HTTP | `POST /v1/messages`, `POST /v1/messages/count_tokens` | a chat in Anthropic's form, or its number of tokens: text, tools, `thinking`, `output_config.format`; `redacted_thinking` is ignored: models cannot read it; an assistant's last text is continued; the key may be in `x-api-key` |
| router, HTTP | `POST /v1/responses`, `POST /v1/responses/input_tokens` | the same for OpenAI's Responses, without a store: text and functions |
| router, HTTP | `POST /tokenize`, `POST /detokenize` | a text or a chat to token ids, and back, with vLLM's fields |
| router, HTTP | `POST /v1/embeddings` | a 400: the models generate text |
| router, HTTP | `GET /v1/models`, `GET /v1/models/NAME` | the models that usable nodes serve |
| router, HTTP | `GET /live`, `GET /ready`, `GET /health` | whether the process lives; whether tokens can flow, otherwise why not |
| router, HTTP | `GET /openapi.json`, `GET /version` | this page for programs; the versions of the process and its protocol |
| router, HTTP | `GET /metrics`, `GET /debug/cluster`, `GET /debug/config`, `GET /debug/kv`, `GET /debug/requests`, `GET /debug/requests/ID` | for operators: see [operating.md](operating.md) |
| router, admin | `GET /live`, `GET /ready`, `GET /health`, `GET /openapi.json`, `GET /version`, `GET /metrics`, `GET /debug/cluster`, `GET /debug/config`, `GET /debug/kv`, `GET /debug/requests`, `GET /debug/requests/ID` | the same, with connections of its own |
| router, admin only | `GET /`, `POST /debug/v1/chat/completions` | the [live page](operating.md#the-live-page), and its chat box: the API key is in `x-api-key` |
| router, gRPC | `baton.v1.Inference` | see [gRPC](#grpc) |
| node, admin | `GET /live`, `GET /ready`, `GET /rollout`, `GET /version`, `GET /metrics`, `GET /debug/config` | for operators |
| prefill or decode node, admin | `POST /sleep`, `POST /wake`, `POST /role` | see [operating.md](operating.md#sleep-and-wake) |

In front of [other engines](routing.md#pools-of-other-engines) the HTTP port has their endpoints instead, and `GET /debug/upstream`.

Errors are in [errors.md](errors.md).

## Request headers

| header | what |
|---|---|
| `authorization: Bearer KEY`, `x-baton-tenant`, `x-baton-priority` | see [security.md](security.md) |
| `x-request-id` | the request's id in logs and pages: up to 128 letters, digits, `-`, `_`, `.` or `:` |
| `x-baton-timeout-ms` | the request's deadline |
| `x-baton-explain: 1` | the answer says where its time went |
| `x-baton-slo: ttft=2s,tbt=50ms` | the longest times to the first token and between tokens, one or both: the request is refused early if it would miss them; see [routing.md](routing.md#who-waits) |
| `x-baton-sheddable: 1` | the request leaves first when its line is full |

### Explanations

With `x-baton-explain: 1` the last chunk of each choice, or the whole answer, has a list `explanations`; over gRPC (`explain`) the end has one. Each moment belongs to one part: `before_first_token_ms` add up to `first_token_ms`, and with `after_first_token_ms` to `total_ms`. `largest` names the largest part, `worst_gap` the longest time between two tokens with its parts and what the node computed in its last `step`. `transfers` list KV by connector, and `transfer_hidden` is the share of their time that no token waited for. `route` has the last decision with its [candidates](routing.md#cost) (HTTP only). `expert.router.explain_share` explains a share of all requests. The log and the request's span get the same as the event `request explained`.

| part | what happens |
|---|---|
| `read` | The router reads the body. |
| `tokenize` | The router parses and tokenizes. |
| `first_answer` | With `n`, a further answer waits for the first one's prompt. |
| `admission` | The request waits in its model's line. |
| `route` | The router chooses nodes, or waits for a usable one. |
| `reserve` | The decode node reserves KV room. A full pool shows here. |
| `store` | A pool node reserves room and takes the KV. |
| `room` | The prompt waits for KV room on the node that computes it. |
| `prefill_queue` | The prompt with room waits for its first step. |
| `prefill_compute` | The node computes the prompt. |
| `prefill_call` | The rest of the call that computes the prompt: the network, and failed calls. |
| `transfer` | The answer waits for KV; hidden transfer time is not counted. |
| `decode_wait` | The KV waits for the first decode step. |
| `first_step` | The first decode step. |
| `decode` | Further steps on the decode node. |
| `client` | Tokens become text and are written to the client. |

## Constrained output

After its reasoning, if any, an answer may have one grammar: a JSON schema, a regular expression for the whole answer, a list of texts, or a context-free grammar. Every token is chosen among those that the grammar allows, so the answer is valid, or cut by `max_tokens` (`finish_reason: \"length\"`). A token that ends the answer is allowed only where the grammar ends.

A grammar that cannot be enforced is refused with a 400 that names the place: `response_format: at /properties/tags: Unimplemented keys: [\"uniqueItems\"]`. Limits: 128 KiB of text, about a second of compilation.

- JSON Schema is draft 2020-12 without `$ref` to `$id`, `$anchor` or other documents, `not`, `if`, `contains`, `uniqueItems`, `propertyNames`, `dependent…` and `unevaluated…`. A `oneOf` needs alternatives that exclude each other. Unknown keywords are annotations. `format` forbids every text that the schema suite calls invalid, and a few valid ones: leap seconds with an offset, hosts in Punycode, quoted mailboxes. Properties come in the schema's order.
- Regular expressions have no look-around or back-references.
- Grammars are in the language of Lark, as [llguidance](https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md) reads it; `%json {…}` in them is JSON by a schema.

With `tool_choice` `required` or a named function the answer is one or more calls (one with a named function or `parallel_tool_calls: false`) in the model's format, with arguments that are valid by the tools' `parameters`. The finish reason is `tool_calls`, and `stop` with a named function. Schemas have the limits above. The formats `pythonic` and `qwen3-coder` have arguments that are not JSON: their `parameters` may have only `properties`, `required` and `additionalProperties`, and a text in `qwen3-coder` only `enum` or `const`; other rules are refused by name.

The model needs a `tokenizer.json`. A mask costs a CPU about 50 µs, while a GPU computes the step.

## gRPC

`baton.v1.Inference` (`proto/proto/baton/v1/inference.proto`) takes a text, token ids or a chat. Parameters, defaults, checks and answers are HTTP's. Each event names its answer (`choice`). An error names the message's field (`chat.messages[2].role`); its code is the metadata `baton-code`. Unlike over HTTP, a text without `max_tokens` may fill the context, and a named call ends as `TOOL_CALLS`. `prompt_logprobs` come once, before all tokens. Only HTTP has several prompts, `echo`, and the prompt's ids. Messages have at most 8 MiB, and may be gzip. The service's health is that of `/ready`.

## Request fields

A field that is unknown, or that would change the answer and is not supported, is refused with a 400 that names it. An ignored field changes nothing in the answer. `null` means absent.

| fields | endpoint | what happens |
|---|---|---|
";

fn fate(field: &RequestField) -> String {
    match field.fate {
        FieldSupport::Honoured("") => "honoured".to_owned(),
        FieldSupport::Honoured(note) => format!("honoured: {note}"),
        FieldSupport::Harmless(note) => format!("ignored: {note}"),
        FieldSupport::Refused { reason, neutral: [] } => format!("refused: {reason}"),
        FieldSupport::Refused { reason, neutral } => {
            format!("refused, except as `{}`: {reason}", neutral.join("` or `"))
        }
    }
}

/// Returns the table of fields for `docs/api.md`. Fields with the same support share a row.
fn page() -> String {
    let mut rows: Vec<(&str, String, Vec<String>)> = Vec::new();
    for field in FIELDS {
        let on = match field.on {
            FieldEndpoints::Chat => "chat",
            FieldEndpoints::Completions => "completions",
            FieldEndpoints::Both => "both",
        };
        let (fate, name) = (fate(field), format!("`{}`", field.name));
        match rows.iter_mut().find(|row| row.0 == on && row.1 == fate) {
            Some(row) => row.2.push(name),
            None => rows.push((on, fate, vec![name])),
        }
    }
    let mut page = HEAD.to_owned();
    for (on, fate, names) in rows {
        writeln!(page, "| {} | {on} | {fate} |", names.join(", ")).expect("a string takes all");
    }
    page
}

#[test]
fn the_page_lists_every_field() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/api.md");
    let page = page();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&file, &page).expect("written");
    }
    let written = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(written == page, "docs/api.md is not what the code says: see its first lines");
}

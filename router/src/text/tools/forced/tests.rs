//! The grammar of each format: what it allows is read as valid calls, and nothing else is allowed.

use std::sync::Arc;

use grammar::{Compiler, Constraint, Vocabulary};
use serde_json::{Value, json};
use types::TokenId;

use super::*;
use crate::text::parts::{Parts, PartsRules, ToolRules};
use crate::text::reasoning::ReasoningTags;
use crate::text::tools::ToolSet;

const END: TokenId = TokenId(256);

fn tool(name: &str, parameters: Value, typed: &[&str]) -> ForcedTool {
    ForcedTool {
        name: name.to_owned(),
        parameters,
        param: format!("tools.{name}"),
        typed: typed.iter().map(|name| (*name).to_owned()).collect(),
    }
}

/// Two tools: one with a text, a number that is optional and a word, and one without parameters.
fn tools() -> Vec<ForcedTool> {
    let parameters = json!({"type": "object", "additionalProperties": false, "required": ["city", "unit"], "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
    }});
    let nothing = json!({"type": "object", "properties": {}, "additionalProperties": false});
    vec![tool("weather", parameters, &["days"]), tool("time-now", nothing, &[])]
}

fn demand(format: ToolFormat, count: CallCount, tools: &[ForcedTool]) -> Result<Grammar, AcceptError> {
    ForcedCalls { tools, format, count, reasoning: None, tokenizer: &Tokenizer::Bytes }.grammar()
}

fn constraint(grammar: &Grammar) -> Constraint {
    let mut words: Vec<Vec<u8>> = (0..=u8::MAX).map(|byte| vec![byte]).collect();
    words.push(Vec::new());
    let vocabulary = Vocabulary::of_words(words, &[END]).expect("it has an end");
    let compiler = Compiler::new(&vocabulary).expect("a vocabulary");
    compiler.constraint(grammar).unwrap_or_else(|error| panic!("{}: {error}", grammar.text()))
}

/// Returns the length of the longest beginning of an answer that is allowed; `None`: all of it, and its end.
fn refused_at(constraint: &Constraint, answer: &str) -> Option<usize> {
    let tokens: Vec<TokenId> = answer.bytes().map(|byte| TokenId(u32::from(byte))).collect();
    let mut next = tokens.iter().chain([&END]).enumerate();
    let is_refused = |(n_read, token): &(usize, &TokenId)| {
        !constraint.mask(&tokens[..*n_read]).is_ok_and(|mask| mask.allows(**token))
    };
    next.find(is_refused).map(|(n_read, _)| n_read)
}

fn parsed(format: ToolFormat, answer: &str) -> Parts {
    let set = Arc::new(ToolSet::new(tools().into_iter().map(|tool| (tool.name, tool.typed))));
    let tools = ToolRules { format, tools: set, calls_max: usize::MAX, seed: 1 };
    let mut parser = PartsRules { reasoning: None, tools: Some(tools) }.parser(0);
    let mut parts = parser.push(answer.to_owned());
    parts.add(parser.finish());
    parts
}

/// An answer with a call of both tools in each format.
const ANSWERS: &[(ToolFormat, &str)] = &[
    (
        ToolFormat::Hermes,
        "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\", \"days\": 3, \"unit\": \"C\"}}\n</tool_call>\n\
         <tool_call>\n{\"name\": \"time-now\", \"arguments\": {}}\n</tool_call>",
    ),
    (
        ToolFormat::Llama3Json,
        "{\"name\": \"weather\", \"parameters\": {\"city\": \"Rome\", \"days\": 3, \"unit\": \"C\"}}; \
         {\"name\": \"time-now\", \"parameters\": {}}",
    ),
    (ToolFormat::Pythonic, "[weather(city=\"Rome\", days=3, unit=\"C\"), time-now()]"),
    (
        ToolFormat::Mistral,
        "[TOOL_CALLS] [{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\", \"days\": 3, \"unit\": \"C\"}}, \
         {\"name\": \"time-now\", \"arguments\": {}}]",
    ),
    (
        ToolFormat::Qwen3Coder,
        "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n</parameter>\n\
         <parameter=unit>\nC\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=time-now>\n</function>\n</tool_call>",
    ),
    (
        ToolFormat::DeepSeek,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{\"city\": \"Rome\", \"days\": 3, \"unit\": \"C\"}\
         <｜tool▁call▁end｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>time-now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
];

#[test]
fn an_answer_is_calls_in_the_models_format() {
    let tools = tools();
    for (format, answer) in ANSWERS {
        let grammar = demand(*format, CallCount::OneOrMore, &tools).expect("a grammar");
        grammar::check(&grammar, 300).unwrap_or_else(|error| panic!("{}: {error}", grammar.text()));
        let several = constraint(&grammar);
        assert_eq!(refused_at(&several, answer), None, "{answer}");
        let parts = parsed(*format, answer);
        let calls = parts.calls.iter().map(|call| {
            let arguments = serde_json::from_str::<Value>(&call.arguments).expect("JSON");
            (call.start.as_ref().expect("a name").name.as_str(), arguments)
        });
        let expected =
            [("weather", json!({"city": "Rome", "days": 3, "unit": "C"})), ("time-now", json!({}))];
        assert_eq!(calls.collect::<Vec<_>>(), expected, "{answer}");
        assert_eq!(parts.text, "", "{answer}");
        let one = constraint(&demand(*format, CallCount::One, &tools).expect("a grammar"));
        assert!(refused_at(&one, answer).is_some_and(|n_read| n_read > answer.len() / 3), "{answer}");
        for (from, to) in
            [("Rome", "\u{0}"), ("3", "\"3\""), ("3", "three"), ("C", "K"), ("weather", "wether")]
        {
            if !(matches!(format, ToolFormat::Qwen3Coder) && from == "Rome") {
                assert!(refused_at(&several, &answer.replace(from, to)).is_some(), "{answer}: {to}");
            }
        }
        assert_eq!(refused_at(&several, "I think"), Some(0), "{answer}");
        assert_eq!(refused_at(&several, ""), Some(0), "{answer}");
    }
}

#[test]
fn an_optional_argument_may_be_left_out_and_a_required_one_may_not() {
    let properties = json!({"a": {"type": "integer"}, "b": {"type": "integer"}, "c": {"type": "integer"}});
    let tools = [tool("f", json!({"properties": properties, "required": ["b"]}), &["a", "b", "c"])];
    let pythonic = constraint(&demand(ToolFormat::Pythonic, CallCount::One, &tools).expect("a grammar"));
    for (answer, is_allowed) in [
        ("[f(b=1)]", true),
        ("[f(a=1, b=2)]", true),
        ("[f(b=1, c=2)]", true),
        ("[f(a=1, b=2, c=-3)]", true),
        ("[f(a=1, c=2)]", false),
        ("[f()]", false),
        ("[f(b=1, )]", false),
        ("[f(b=1c=2)]", false),
    ] {
        assert_eq!(refused_at(&pythonic, answer).is_none(), is_allowed, "{answer}");
    }
}

#[test]
fn a_model_may_reason_before_it_calls() {
    let tags = ReasoningTags::of_template("</think>").expect("its tags");
    let tools = tools();
    let of = |opened| {
        let reasoning = Some(ReasoningRules { tags, opened, included: true });
        let (format, count) = (ToolFormat::Hermes, CallCount::OneOrMore);
        let demand = ForcedCalls { tools: &tools, format, count, reasoning, tokenizer: &Tokenizer::Bytes };
        constraint(&demand.grammar().expect("a grammar"))
    };
    let (closed, opened, call) = (of(false), of(true), ANSWERS[0].1);
    for (constraint, answer, is_allowed) in [
        (&closed, call.to_owned(), true),
        (&closed, format!("<think>\nHm, <b>.\n</think>\n\n{call}"), true),
        (&closed, format!("Hm.</think>{call}"), false),
        (&opened, format!("Hm, <b>.\n</think>\n\n{call}"), true),
        (&opened, "Hm.</think> No.".to_owned(), false),
    ] {
        assert_eq!(refused_at(constraint, &answer).is_none(), is_allowed, "{answer}");
    }
}

#[test]
fn a_model_may_reason_before_an_answer_by_a_grammar() {
    let tags = ReasoningTags::of_template("</think>").expect("its tags");
    let schema = json!({"type": "object", "properties": {"a": {"enum": ["<think>", 1]}}, "required": ["a"]});
    let json = sources::json_schema(&schema.to_string());
    let choice = sources::choice(["yes", "no"]);
    let lark = sources::lark("start: r1 \"!\"\nr1: \"yes\" | \"no\" // }\n");
    let of = |grammar: &Grammar, opened| {
        let reasoning = ReasoningRules { tags, opened, included: true };
        let whole = after_reasoning(grammar, &reasoning, &Tokenizer::Bytes).expect("a grammar");
        grammar::check(&whole, 300).unwrap_or_else(|error| panic!("{}: {error}", whole.text()));
        constraint(&whole)
    };
    let object = "{\"a\": \"<think>\"}";
    for (grammar, opened, answer, is_allowed) in [
        (&json, false, object.to_owned(), true),
        (&json, false, format!("<think>\nHm, <b>.\n</think>\n\n{object}"), true),
        (&json, true, format!("Hm, <b>.\n</think>\n\n{object}"), true),
        (&json, true, object.to_owned(), false),
        (&json, true, "Hm.</think>No.".to_owned(), false),
        (&choice, true, "yes".to_owned(), false),
        (&choice, true, "Hm.</think>yes".to_owned(), true),
        (&sources::regex("a/b{2}"), true, "Hm.</think>a/bb".to_owned(), true),
        (&lark, true, "Hm.</think>no!".to_owned(), true),
        (&lark, true, "Hm.</think>no".to_owned(), false),
    ] {
        let refused = refused_at(&of(grammar, opened), &answer);
        assert_eq!(refused.is_none(), is_allowed, "{answer}: {refused:?}");
    }
}

#[test]
fn what_a_format_cannot_enforce_is_refused_by_name() {
    let text = |schema: Value| json!({"properties": {"a": schema}});
    for (format, parameters, param) in [
        (ToolFormat::Pythonic, json!({"anyOf": [{}]}), "tools.f.anyOf"),
        (ToolFormat::Pythonic, json!({"minProperties": 1}), "tools.f.minProperties"),
        (ToolFormat::Pythonic, json!({"properties": {"a-b": {}}}), "tools.f.properties.a-b"),
        (ToolFormat::Pythonic, json!({"required": ["x"]}), "tools.f"),
        (ToolFormat::Qwen3Coder, json!({"patternProperties": {}}), "tools.f.patternProperties"),
        (ToolFormat::Qwen3Coder, json!({"properties": {"<a>": {}}}), "tools.f.properties.<a>"),
        (ToolFormat::Qwen3Coder, text(json!({"pattern": "a+"})), "tools.f.properties.a.pattern"),
        (ToolFormat::Qwen3Coder, text(json!({"enum": ["x", 1]})), "tools.f.properties.a.enum"),
        (ToolFormat::Qwen3Coder, text(json!(false)), "tools.f.properties.a"),
        (ToolFormat::Hermes, json!({"type": "array"}), "tools.f"),
        (ToolFormat::Mistral, json!([]), "tools.f"),
        (ToolFormat::DeepSeek, json!({"x-guidance": {}}), "tools.f"),
    ] {
        let error = demand(format, CallCount::One, &[tool("f", parameters.clone(), &[])]);
        assert_eq!(error.expect_err("refused").param(), param, "{parameters}");
    }
}

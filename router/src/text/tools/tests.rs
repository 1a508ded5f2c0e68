//! Recorded answers of each format, cut in many ways. The fixtures have an answer in a line, with its text
//! and its calls; variants of them have other words.

use proptest::prelude::*;
use serde::Deserialize;
use serde_json::Value;

use super::*;
use crate::text::parts::{Parts, PartsRules, ToolRules};

#[derive(Clone, Debug, Deserialize)]
struct Recorded {
    answer: String,
    text: String,
    calls: Vec<(String, Value)>,
}

const FORMATS: &[(ToolFormat, &str)] = &[
    (ToolFormat::Hermes, include_str!("fixtures/hermes.json")),
    (ToolFormat::Llama3Json, include_str!("fixtures/llama3_json.json")),
    (ToolFormat::Pythonic, include_str!("fixtures/pythonic.json")),
    (ToolFormat::Mistral, include_str!("fixtures/mistral.json")),
    (ToolFormat::Qwen3Coder, include_str!("fixtures/qwen3_coder.json")),
    (ToolFormat::DeepSeek, include_str!("fixtures/deepseek.json")),
];

/// The words that replace `Paris` in a variant.
const WORDS: &[&str] = &[
    "Paris",
    "New York",
    "Zürich",
    "東京",
    "🦀",
    "a <b> c",
    "x{y}z; [1]",
    "<｜tool",
    "</para",
    "TOOL_CALLS]",
];

fn variants(fixture: &str) -> Vec<Recorded> {
    let recorded: Vec<Recorded> = serde_json::from_str(fixture).expect("a list of answers");
    assert!(recorded.len() >= 20, "{}", recorded.len());
    let variants: Vec<Recorded> = WORDS
        .iter()
        .flat_map(|word| {
            let other = |text: &str| text.replace("Paris", word);
            recorded.iter().map(move |one| Recorded {
                answer: other(&one.answer),
                text: other(&one.text),
                calls: serde_json::from_str(&other(&serde_json::to_string(&one.calls).expect("JSON")))
                    .expect("JSON"),
            })
        })
        .collect();
    assert!(variants.len() >= 200, "{}", variants.len());
    variants
}

fn rules(format: ToolFormat) -> PartsRules {
    let typed = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    let tools = [
        ("get_weather", typed(&[])),
        ("search", typed(&["limit"])),
        ("now", typed(&[])),
        ("write_file", typed(&[])),
        ("reserve", typed(&["guests", "place", "sure"])),
    ];
    let set = ToolSet::new(tools.map(|(name, typed)| (name.to_owned(), typed)));
    let tools = ToolRules { format, tools: set.into(), calls_max: usize::MAX, seed: 7 };
    PartsRules { reasoning: None, tools: Some(tools) }
}

fn parsed<'a>(rules: &PartsRules, pieces: impl IntoIterator<Item = &'a str>) -> Parts {
    let mut parser = rules.parser(0);
    let mut whole = Parts::default();
    pieces.into_iter().for_each(|piece| whole.add(parser.push(piece.to_owned())));
    whole.add(parser.finish());
    whole
}

fn check(recorded: &Recorded, parts: &Parts) {
    assert_eq!(parts.text, recorded.text, "{}", recorded.answer);
    let call = |delta: &CallDelta| {
        let name = delta.start.as_ref().expect("a name").name.clone();
        let arguments = serde_json::from_str(&delta.arguments);
        (name, arguments.unwrap_or_else(|error| panic!("{}: {error}", delta.arguments)))
    };
    let calls: Vec<(String, Value)> = parts.calls.iter().map(call).collect();
    assert_eq!(calls, recorded.calls, "{}", recorded.answer);
    assert!(parts.calls.iter().enumerate().all(|(nth, call)| call.index == nth));
}

#[test]
fn recorded_answers_are_divided_wherever_they_are_cut_in_two() {
    for (format, fixture) in FORMATS {
        let rules = rules(*format);
        for recorded in variants(fixture) {
            let whole = parsed(&rules, [recorded.answer.as_str()]);
            check(&recorded, &whole);
            for (at, _) in recorded.answer.char_indices() {
                let (a, b) = recorded.answer.split_at(at);
                assert_eq!(parsed(&rules, [a, b]), whole, "{a:?} {b:?}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn the_joined_pieces_are_the_whole(
        nth in any::<prop::sample::Index>(),
        cuts in prop::collection::btree_set(0_usize..400, 0..60),
    ) {
        for (format, fixture) in FORMATS {
            let rules = rules(*format);
            let recorded: Vec<Recorded> = serde_json::from_str(fixture).expect("a list of answers");
            let answer = nth.get(&recorded).answer.replace("Paris", WORDS[nth.index(WORDS.len())]);
            let whole = parsed(&rules, [answer.as_str()]);
            let ends: Vec<usize> = cuts.iter().copied().filter(|at| answer.is_char_boundary(*at)).collect();
            let starts = std::iter::once(0).chain(ends.iter().copied());
            let pieces = starts.zip(ends.iter().copied().chain([answer.len()]));
            prop_assert_eq!(parsed(&rules, pieces.map(|(start, end)| &answer[start..end])), whole);
        }
    }

    /// Any text, made of the marks of the formats, is divided without loss of order and without a panic.
    #[test]
    fn any_text_is_divided_the_same_in_pieces(
        words in prop::collection::vec(prop::sample::select(PIECES), 0..40),
    ) {
        for (format, _) in FORMATS {
            let rules = rules(*format);
            let answer = words.concat();
            let whole = parsed(&rules, [answer.as_str()]);
            prop_assert_eq!(parsed(&rules, words.iter().copied()), whole.clone());
            let n_calls = whole.calls.len();
            prop_assert!(n_calls > 0 || whole.text == answer, "{:?} became {:?}", answer, whole.text);
        }
    }
}

const PIECES: &[&str] = &[
    "<tool_call>",
    "</tool_call>",
    "<function=",
    "now",
    ">",
    "</function>",
    "<parameter=",
    "</parameter>",
    "{",
    "}",
    "\"name\"",
    ": ",
    "\"now\"",
    "\"arguments\"",
    "\"",
    ",",
    "[",
    "]",
    "(",
    ")",
    "=",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<",
    " ",
    "\n",
    ";",
    "\\",
    "é",
];

#[test]
fn arguments_arrive_in_pieces_after_the_name() {
    let mut parser = rules(ToolFormat::Hermes).parser(1);
    let pieces = [
        "Yes.\n<tool_",
        "call>\n{\"name\": \"sea",
        "rch\", \"arguments\": {\"que",
        "ry\": 1}}\n</tool_call>",
    ];
    let parts: Vec<Parts> = pieces.iter().map(|piece| parser.push((*piece).to_owned())).collect();
    assert_eq!(parts[0].text, "Yes.");
    assert_eq!(parts[1], Parts::default());
    let start = parts[2].calls[0].start.as_ref().expect("the name");
    assert_eq!((start.name.as_str(), start.id.len()), ("search", 29));
    assert_eq!(parts[2].calls[0].arguments, "{\"que");
    let rest = CallDelta { index: 0, start: None, arguments: "ry\": 1}".to_owned() };
    assert_eq!(parts[3].calls, [rest]);
}

#[test]
fn a_text_in_xml_goes_out_as_it_comes() {
    let mut parser = rules(ToolFormat::Qwen3Coder).parser(0);
    let parts = parser.push("<function=write_file><parameter=text>\nline \"1\"\nli".to_owned());
    assert_eq!(parts.calls[0].arguments, r#"{"text": "line \"1\"\nli"#);
}

#[test]
fn later_calls_are_left_out_where_one_is_allowed() {
    let mut rules = rules(ToolFormat::Llama3Json);
    rules.tools.as_mut().expect("tools").calls_max = 1;
    let call = r#"{"name": "now", "parameters": {}}"#;
    let parts = parsed(&rules, [call, ";", call]);
    assert_eq!((parts.calls.len(), parts.text.as_str()), (1, ""));
    assert_eq!(parts.calls[0].arguments, "{}");
}

#[test]
fn ids_differ_and_are_short_where_the_template_wants_it() {
    let ids = |format, text: &str| -> Vec<String> {
        let parts = parsed(&rules(format), [text]);
        parts.calls.into_iter().map(|call| call.start.expect("a start").id).collect()
    };
    let ids = ids(ToolFormat::Mistral, "[TOOL_CALLS]now{}[TOOL_CALLS]now{}");
    assert!(ids[0] != ids[1] && ids.iter().all(|id| id.len() == 9), "{ids:?}");
}

#[test]
fn templates_show_their_format() {
    for (source, format) in [
        ("{{ '<tool_call>' }}", Some(ToolFormat::Hermes)),
        ("<tool_call>\n<function=example>", Some(ToolFormat::Qwen3Coder)),
        ("{{ '[TOOL_CALLS] [' }}", Some(ToolFormat::Mistral)),
        ("{{ '<｜tool▁calls▁begin｜>' }}", Some(ToolFormat::DeepSeek)),
        (r#"<|start_header_id|> {"name": function name, "parameters": x}"#, Some(ToolFormat::Llama3Json)),
        ("[func_name1(params_name1=params_value1)]", Some(ToolFormat::Pythonic)),
        ("{{ message.content }}", None),
    ] {
        assert_eq!(ToolFormat::of_template(source), format, "{source}");
    }
    assert!(ToolFormat::names().all(|name| ToolFormat::named(name).is_some()));
    assert_eq!(ToolFormat::named("xml"), None);
}

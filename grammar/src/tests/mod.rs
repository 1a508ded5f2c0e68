//! Tests over a vocabulary of bytes, whose token 256 ends an answer.

mod added;
mod refusals;
mod suite;

use types::{Grammar, TokenId};

use crate::{AddedTokens, Compiler, Constraint, ConstraintError, Vocabulary, sources};

const END: TokenId = TokenId(256);

fn compiler() -> Compiler {
    let mut words: Vec<Vec<u8>> = (0..=u8::MAX).map(|byte| vec![byte]).collect();
    words.push(Vec::new());
    Compiler::new(&Vocabulary::of_words(words, &[END]).expect("it has an end")).expect("a vocabulary")
}

fn tokens(text: &str) -> Vec<TokenId> {
    text.bytes().map(|byte| TokenId(u32::from(byte))).collect()
}

/// Returns whether the constraint allows each byte of a text, and its end.
fn allows(constraint: &Constraint, text: &str) -> bool {
    let tokens = tokens(text);
    let next = tokens.iter().chain([&END]).enumerate();
    next.into_iter()
        .all(|(n_read, token)| constraint.mask(&tokens[..n_read]).is_ok_and(|mask| mask.allows(*token)))
}

fn constraint(grammar: &Grammar) -> Constraint {
    compiler().constraint(grammar).unwrap_or_else(|error| panic!("{grammar:?}: {error}"))
}

#[test]
fn an_answer_follows_its_grammar() {
    let schema = r#"{"type":"object","properties":{"n":{"type":"integer"}},"required":["n"],"additionalProperties":false}"#;
    for (grammar, allowed, forbidden) in [
        (sources::json_schema(schema), r#"{"n": 12}"#, r#"{"n": "12"}"#),
        (sources::json_schema(schema), "{\n  \"n\": 12\n}", "{}"),
        (sources::json_object(), r#"{"a":[1,{"b":null}]}"#, "[1]"),
        (sources::regex("[a-c]{2,3}"), "abc", "abcd"),
        (sources::regex("[a-c]{2,3}"), "ab", "a"),
        (sources::choice(["yes", "n\"\n\\o", "ja|nein"]), "n\"\n\\o", "ja"),
        (sources::choice(["yes", "no"]), "yes", "yesno"),
        (sources::lark("start: \"a\" start \"b\" | \"c\""), "aacbb", "aacb"),
        (sources::lark("start: \"<t>\" x \"</t>\"\nx: %json {\"type\":\"array\"}"), "<t>[1]</t>", "<t>1</t>"),
    ] {
        assert!(allows(&constraint(&grammar), allowed), "{grammar:?} {allowed}");
        assert!(!allows(&constraint(&grammar), forbidden), "{grammar:?} {forbidden}");
    }
}

#[test]
fn a_dead_end_is_told_from_a_limit() {
    let constraint = constraint(&sources::lark("start: \"abc\" x | \"abd\"\nx: x"));
    assert!(allows(&constraint, "abd"));
    let reason = constraint.mask(&tokens("abc")).expect_err("`x` has no end");
    assert_eq!(reason, ConstraintError::DeadEnd);
}

#[test]
fn a_format_is_enforced_beside_other_rules_and_in_schemas_only() {
    for (schema, allowed, forbidden) in [
        (r#"{"type":"string","format":"date","pattern":"^2"}"#, r#""2024-02-29""#, r#""1996-02-29""#),
        (r#"{"type":"string","format":"date","pattern":"^2"}"#, r#""2000-02-29""#, r#""2023-02-29""#),
        (r#"{"type":"string","format":"hostname","maxLength":3}"#, r#""a.b""#, r#""a.bc""#),
        (r#"{"type":"string","format":"hostname","maxLength":900}"#, r#""a--b""#, r#""ab--c""#),
        (r#"{"format":"time"}"#, "12", r#""12:59:60Z""#),
        (r#"{"properties":{"format":{"const":"date"}}}"#, r#"{"format":"date"}"#, r#"{"format":"time"}"#),
        (r#"{"const":{"format":"date"}}"#, r#"{"format":"date"}"#, r#"{"format":"2024-01-01"}"#),
        (
            r##"{"$ref":"#/$defs/day","$defs":{"day":{"type":"string","format":"date"}}}"##,
            r#""2000-02-29""#,
            r#""1900-02-29""#,
        ),
    ] {
        let constraint = constraint(&sources::json_schema(schema));
        assert!(allows(&constraint, allowed), "{schema} {allowed}");
        assert!(!allows(&constraint, forbidden), "{schema} {forbidden}");
    }
}

#[test]
fn a_grammar_names_special_tokens_by_their_ids() {
    let mut words: Vec<Vec<u8>> = (0..=u8::MAX).map(|byte| vec![byte]).collect();
    words.resize(300, Vec::new());
    let vocabulary = Vocabulary::of_words(words, &[END]).expect("it has an end");
    let (open, close) = (TokenId(280), TokenId(281));
    let schema = serde_json::json!({"type": "integer"});
    let text = format!(
        "start: /(.|\\n)*/ {} json {}\njson: {}",
        sources::token(open),
        sources::token(close),
        sources::embedded_json(&schema).expect("a schema"),
    );
    let grammar = sources::lark(&text);
    crate::check(&grammar, 300).expect("it can be compiled");
    let constraint =
        Compiler::new(&vocabulary).expect("a vocabulary").constraint(&grammar).expect("a grammar");
    let answer = [tokens("a<\n"), vec![open], tokens("17"), vec![close, END]].concat();
    for (n_read, token) in answer.iter().enumerate() {
        let mask = constraint.mask(&answer[..n_read]).expect("a mask");
        assert!(mask.allows(*token), "{token:?} after {n_read} tokens");
        assert_eq!(mask.allows(close), *token == close || n_read == 5, "after {n_read} tokens");
    }
}

#[test]
fn the_end_is_allowed_only_where_the_grammar_ends() {
    let constraint = constraint(&sources::regex("ab?"));
    for (text, ends, goes_on) in [("", false, true), ("a", true, true), ("ab", true, false)] {
        let mask = constraint.mask(&tokens(text)).expect("a mask");
        let next = (0..256).map(TokenId).any(|token| mask.allows(token));
        assert_eq!((mask.allows(END), next), (ends, goes_on), "{text:?}");
    }
    // A step may be in flight when the end is drawn.
    let after_end = [tokens("a"), vec![END, END]].concat();
    assert!(constraint.mask(&after_end).expect("a mask").allows(END));
}

#[test]
fn the_state_follows_from_the_tokens() {
    let compiler = compiler();
    let grammar = sources::json_schema(r#"{"enum":["abc","abd","x"]}"#);
    let went_on = compiler.constraint(&grammar).expect("a grammar");
    let text = tokens("\"ab");
    for n_read in 0..=text.len() {
        // `fresh` reads all tokens at once, like a sequence on another node.
        let fresh = compiler.constraint(&grammar).expect("a grammar");
        let of = |constraint: &Constraint| {
            let mask = constraint.mask(&text[..n_read]).expect("a mask");
            (0..257).map(TokenId).filter(|token| mask.allows(*token)).collect::<Vec<_>>()
        };
        assert_eq!(of(&went_on), of(&fresh), "after {n_read} tokens");
    }
    // A constraint that has read other tokens begins again.
    assert!(allows(&went_on, "\"x\""));
}

#[test]
fn a_mask_hides_the_logits_of_other_tokens() {
    let mask = constraint(&sources::regex("[ab]")).mask(&[]).expect("a mask");
    let mut logits = vec![1.0; 300];
    mask.apply(&mut logits);
    let left: Vec<usize> = (0..300).filter(|token| logits[*token].is_finite()).collect();
    assert_eq!(left, [usize::from(b'a'), usize::from(b'b')]);
}

#[test]
fn compiled_grammars_are_kept_within_a_bound() {
    let compiler = compiler();
    let grammar = |nth: usize| sources::regex(&format!("a{{{nth}}}"));
    for nth in 1..=crate::compiler::KEPT_MAX + 1 {
        compiler.constraint(&grammar(nth)).expect("a grammar");
    }
    assert!(compiler.kept(&grammar(1)).is_none());
    assert!(compiler.kept(&grammar(2)).is_some());
}

#[test]
fn a_vocabulary_is_read_from_the_tokenizer() {
    let json = include_bytes!("../../../models/demo/tokenizer.json");
    let vocabulary =
        Vocabulary::new(json, &AddedTokens::default(), 2048, &[TokenId(1)]).expect("the demo model's");
    let constraint =
        Compiler::new(&vocabulary).map(|compiler| compiler.constraint(&sources::choice(["The", "Th"])));
    let mask = constraint.expect("a vocabulary").expect("a grammar").mask(&[]).expect("a mask");
    let allowed: Vec<u32> = (0..2048).filter(|token| mask.allows(TokenId(*token))).collect();
    let bytes =
        crate::TokenBytes::of_tokenizer(&tokenizers::Tokenizer::from_bytes(json).expect("a tokenizer"));
    let bytes = bytes.expect("known bytes");
    let texts: Vec<&[u8]> = allowed.iter().map(|token| bytes.of(TokenId(*token))).collect();
    assert!(texts.contains(&b"T".as_slice()) && texts.contains(&b"Th".as_slice()), "{texts:?}");
    assert!(texts.iter().all(|text| b"The".starts_with(text)), "{texts:?}");
    let error = Vocabulary::new(json, &AddedTokens::default(), 2048, &[]).expect_err("no end");
    assert_eq!(error.to_string(), "the model has no token that ends an answer");
}

use proptest::prelude::*;

use super::*;

fn stops(strings: &[&str]) -> StopStrings {
    StopStrings::new(strings.iter().map(|string| (*string).to_owned()).collect()).expect("sane stop strings")
}

/// Returns the pieces of the answer's text, and whether a stop string ended it.
fn pieces(tokens: &[TokenId], stop: &StopStrings, min_tokens: u32) -> (Vec<String>, bool) {
    let mut detokenizer = Detokenizer::new(Arc::new(Tokenizer::Bytes), stop, min_tokens);
    let mut pieces = Vec::new();
    for token in tokens {
        let mut piece = String::new();
        let flow = detokenizer.push(*token, &mut piece);
        pieces.push(piece);
        if flow.is_break() {
            return (pieces, true);
        }
    }
    let mut piece = String::new();
    detokenizer.finish(&mut piece);
    pieces.push(piece);
    (pieces, false)
}

fn tokens(bytes: &[u8]) -> Vec<TokenId> {
    bytes.iter().map(|byte| TokenId(u32::from(*byte))).collect()
}

fn text(bytes: &[u8], stop: &[&str]) -> (String, bool) {
    let (pieces, stopped) = pieces(&tokens(bytes), &stops(stop), 0);
    (pieces.concat(), stopped)
}

#[test]
fn a_character_comes_out_with_its_last_byte() {
    let (pieces, _) = pieces(&tokens("a→🦀".as_bytes()), &stops(&[]), 0);
    assert_eq!(pieces, ["a", "", "", "→", "", "", "", "🦀", ""]);
}

#[test]
fn what_never_becomes_a_character_is_replaced() {
    assert_eq!(text(b"a\xff\xfeb", &[]).0, "a\u{fffd}\u{fffd}b");
    assert_eq!(text(b"a\xe2\x86", &[]).0, "a\u{fffd}", "cut off at the end");
    assert_eq!(text(b"\xe2\x86z", &[]).0, "\u{fffd}z", "cut off in the middle");
}

#[test]
fn stop_strings_table() {
    for (answer, stop, expected, stopped) in [
        ("one two three", &["two"][..], "one ", true),
        ("one two three", &["four", "three", "two"], "one ", true),
        ("one tw", &["two"], "one tw", false),
        ("aab", &["ab"], "a", true),
        ("ababac", &["abac"], "ab", true),
        ("two", &["two"], "", true),
        ("abcd", &["abcd", "c"], "ab", true),
        ("xabc", &["bc", "abc"], "x", true),
        ("Grüße→", &["ß"], "Grü", true),
        ("anything", &[], "anything", false),
    ] {
        assert_eq!(text(answer.as_bytes(), stop), (expected.to_owned(), stopped), "{answer:?} with {stop:?}");
    }
}

#[test]
fn text_is_held_back_only_while_a_stop_string_may_complete() {
    let (pieces, _) = pieces(&tokens(b"a STOre"), &stops(&["STOP"]), 0);
    assert_eq!(pieces, ["a", " ", "", "", "", "STOr", "e", ""]);
}

#[test]
fn the_first_tokens_are_not_searched() {
    let (pieces, stopped) = pieces(&tokens(b"xxyx"), &stops(&["x"]), 2);
    assert_eq!((pieces.concat().as_str(), stopped), ("xxy", true));
}

#[test]
fn special_tokens_have_no_text() {
    let (pieces, _) = pieces(&Tokenizer::Bytes.encode("a<|end|>").expect("bytes"), &stops(&[]), 0);
    assert_eq!(pieces.concat(), "a");
}

#[test]
fn bad_stop_strings_are_refused() {
    for bad in [vec![String::new()], vec!["a".to_owned(); 17], vec!["a".repeat(1025)]] {
        assert_eq!(StopStrings::new(bad).expect_err("refused").param(), "stop");
    }
}

/// Returns the expected text of an answer, computed on the whole text. Every way of splitting it into tokens
/// must give the same.
fn model(whole: &str, stop: &[String]) -> String {
    let ends = stop.iter().filter_map(|string| whole.find(string).map(|at| (at + string.len(), at)));
    ends.min().map_or(whole, |(_, at)| &whole[..at]).to_owned()
}

/// Splits `bytes` at `places`, each modulo the number of possible places.
fn cut<'a>(bytes: &'a [u8], places: &[usize]) -> Vec<&'a [u8]> {
    let mut places: Vec<usize> = places.iter().map(|place| place % (bytes.len() + 1)).collect();
    places.extend([0, bytes.len()]);
    places.sort_unstable();
    places.windows(2).map(|pair| &bytes[pair[0]..pair[1]]).collect()
}

proptest! {
    #[test]
    fn bytes_cut_anywhere_give_the_same_characters(
        bytes in prop_oneof![proptest::collection::vec(any::<u8>(), 0..64), ".{0,24}".prop_map(String::into_bytes)],
        places in proptest::collection::vec(any::<usize>(), 0..12),
    ) {
        let (mut characters, mut text) = (Characters::default(), String::new());
        for piece in cut(&bytes, &places) {
            characters.push(piece, &mut text);
            prop_assert!(characters.incomplete.len() <= 3);
        }
        characters.finish(&mut text);
        prop_assert_eq!(text, String::from_utf8_lossy(&bytes).into_owned());
    }

    #[test]
    fn text_cut_anywhere_stops_at_the_same_place(
        whole in "[abc→]{0,40}",
        stop in proptest::collection::vec("[abc→]{1,4}", 0..4),
        places in proptest::collection::vec(any::<usize>(), 0..12),
    ) {
        let strings = StopStrings::new(stop.clone()).expect("sane stop strings");
        let (mut scanner, mut characters) = (StopScanner::new(strings), Characters::default());
        let (mut text, mut stopped) = (String::new(), false);
        for piece in cut(whole.as_bytes(), &places) {
            let mut decoded = String::new();
            characters.push(piece, &mut decoded);
            stopped = stopped || scanner.push(&decoded, &mut text).is_break();
            if stopped {
                break;
            }
        }
        if !stopped {
            scanner.finish(&mut text);
        }
        prop_assert_eq!(text, model(&whole, &stop));
    }
}

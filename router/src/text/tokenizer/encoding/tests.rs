use std::sync::LazyLock;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;
use serde_json::{Value, json};
use types::{CacheSalt, TenantId};

use super::super::{Bos, HuggingFace};
use super::*;

const DEMO: &[u8] = include_bytes!("../../../../../models/demo/tokenizer.json");
const LLAMA_LIKE: &[u8] = include_bytes!("../fixtures/llama_like.tokenizer.json");

/// A tokenizer, with the names of its added tokens.
struct Sample {
    name: &'static str,
    tokenizer: Arc<Tokenizer>,
    added: Vec<String>,
}

impl Sample {
    fn new(name: &'static str, json: &Value) -> Self {
        let tokenizer = HuggingFace::new(json.to_string().as_bytes()).expect("a tokenizer");
        let added = json["added_tokens"].as_array().expect("a list").iter();
        let added = added.map(|token| token["content"].as_str().expect("a name").to_owned()).collect();
        Self { name, tokenizer: Arc::new(Tokenizer::HuggingFace(Box::new(tokenizer))), added }
    }

    fn is_cut(&self) -> bool {
        let Tokenizer::HuggingFace(tokenizer) = &*self.tokenizer else { return false };
        tokenizer.cuts(&PromptText::Rendered(String::new())).is_some()
    }
}

fn parsed(json: &[u8]) -> Value {
    serde_json::from_slice(json).expect("JSON")
}

/// Returns the demo model's tokenizer with changed rules of its added tokens, and with tokens of spaces and of words.
fn demo_with(rules: &[&str], normalizer: Value) -> Value {
    let mut demo = parsed(DEMO);
    let tokens = demo["added_tokens"].as_array_mut().expect("a list");
    for (nth, content) in ["  ", "two", "_two", "<|", "<|end|><|user|>", " <|mask|>"].into_iter().enumerate()
    {
        let mut token = tokens[0].clone();
        (token["id"], token["content"]) = (json!(2048 + nth), json!(content));
        tokens.push(token);
    }
    for (nth, token) in tokens.iter_mut().enumerate() {
        for rule in rules.iter().skip(nth % 2) {
            token[*rule] = json!(true);
        }
    }
    demo["normalizer"] = normalizer;
    demo
}

fn metaspace(scheme: &str) -> Value {
    let mut llama = parsed(LLAMA_LIKE);
    llama["normalizer"] = Value::Null;
    llama["pre_tokenizer"] = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": scheme != "never"});
    llama
}

/// Returns the tokenizers of the test models, and variants with every rule that looks beyond a token. The last one is
/// not cut.
fn samples() -> Vec<Sample> {
    let mut prefix_space = parsed(DEMO);
    prefix_space["pre_tokenizer"]["add_prefix_space"] = json!(true);
    let mut random = parsed(DEMO);
    random["model"]["dropout"] = json!(0.5);
    let lowercase = json!({"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Lowercase"}]});
    let mut unigram = metaspace("first");
    let vocab = parsed(LLAMA_LIKE)["model"]["vocab"].as_object().expect("tokens").clone();
    let scored: Vec<Value> = vocab.keys().map(|token| json!([token, -(token.len() as f64)])).collect();
    unigram["model"] = json!({"type": "Unigram", "unk_id": 0, "vocab": scored, "byte_fallback": true});
    let mut strip = demo_with(&[], json!({"type": "Strip", "strip_left": true, "strip_right": true}));
    strip["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [
        {"type": "Digits", "individual_digits": true}, strip["pre_tokenizer"].clone()]});
    vec![
        Sample::new("demo", &parsed(DEMO)),
        Sample::new("llama-like", &parsed(LLAMA_LIKE)),
        Sample::new("prefix space", &prefix_space),
        Sample::new("rstrip", &demo_with(&["rstrip"], Value::Null)),
        Sample::new("lstrip", &demo_with(&["lstrip"], Value::Null)),
        Sample::new("both", &demo_with(&["lstrip", "rstrip"], Value::Null)),
        Sample::new("single words", &demo_with(&["single_word"], Value::Null)),
        Sample::new("words and spaces", &demo_with(&["single_word", "rstrip"], Value::Null)),
        Sample::new("normalized", &demo_with(&["normalized"], lowercase.clone())),
        Sample::new("normalizer", &demo_with(&[], lowercase)),
        Sample::new("strip", &strip),
        Sample::new("metaspace first", &metaspace("first")),
        Sample::new("metaspace always", &metaspace("always")),
        Sample::new("metaspace never", &metaspace("never")),
        Sample::new("unigram", &unigram),
        Sample::new("random", &random),
    ]
}

static SAMPLES: LazyLock<Vec<Sample>> = LazyLock::new(samples);

fn scope() -> CacheScope {
    CacheScope { tenant: TenantId::new("acme"), salt: CacheSalt::default() }
}

fn encode(sample: &Sample, text: PromptText, budgets: &[usize]) -> (Vec<TokenId>, PieceCounts) {
    let mut encoding = TextEncoding::new(Arc::clone(&sample.tokenizer), text, scope());
    let mut budgets = budgets.iter().copied().chain([usize::MAX]);
    while !encoding.advance(budgets.next().expect("the last one suffices")).expect("it encodes") {}
    encoding.into_tokens()
}

/// A part of a message: a text, or the name of an added token.
#[derive(Clone, Debug)]
enum Part {
    Text(String),
    Added(Index),
}

fn part() -> impl Strategy<Value = Part> {
    let texts = prop::sample::select(vec![
        "two",
        "Two words",
        "_",
        " ",
        "  ",
        "\n",
        "\n\n",
        "\t",
        "ünï",
        "🦀",
        "１２",
        "ﬁ",
        "12 345",
        "<|",
        "|>",
        "<",
        "e\u{301}",
        "\u{a0}",
        "\u{2028}",
        "<|end|",
        "don't",
        "x",
    ]);
    prop_oneof![
        3 => texts.prop_map(|text| Part::Text(text.to_owned())),
        1 => "\\PC{0,12}".prop_map(Part::Text),
        3 => any::<Index>().prop_map(Part::Added),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100_000))]

    /// A conversation grows turn by turn. Its pieces must have the ids of the whole, whether they were seen before or not,
    /// and wherever the work goes to another thread.
    #[test]
    fn pieces_have_the_ids_of_the_whole(
        which in any::<Index>(),
        turns in vec(vec(part(), 0..12), 1..3),
        budgets in vec(0usize..60, 0..3),
    ) {
        let sample = which.get(&SAMPLES[..SAMPLES.len() - 1]);
        let mut text = String::new();
        for turn in turns {
            for part in turn {
                match part {
                    Part::Text(part) => text.push_str(&part),
                    Part::Added(which) => text.push_str(which.get::<String>(&sample.added)),
                }
            }
            let whole = sample.tokenizer.encode(&text).expect("it encodes");
            let (tokens, _) = encode(sample, PromptText::Rendered(text.clone()), &budgets);
            prop_assert_eq!(tokens, whole, "{}: {:?}", sample.name, text);
        }
    }
}

#[test]
fn only_tokenizers_that_draw_or_lack_plain_tokens_are_not_cut() {
    let whole: Vec<&str> = SAMPLES.iter().filter(|one| !one.is_cut()).map(|one| one.name).collect();
    assert_eq!(whole, ["random"]);
    // The second rule is that of all tokens.
    let normalized = demo_with(&["normalized", "normalized"], Value::Null);
    assert!(!Sample::new("all normalized", &normalized).is_cut());
}

#[test]
fn plain_texts_begin_as_the_model_expects() {
    let text = || PromptText::Plain("<s> one</s>two".to_owned());
    for (bos, is_cut) in [(Bos::PostProcessor, false), (Bos::Nothing, true), (Bos::Token(TokenId(1)), true)] {
        let tokenizer = HuggingFace::new(LLAMA_LIKE).expect("a tokenizer").with_bos(bos);
        assert_eq!(tokenizer.cuts(&text()).is_some(), is_cut);
        let whole = tokenizer.encode_plain(text().as_str()).expect("it encodes");
        let tokenizer = Arc::new(Tokenizer::HuggingFace(Box::new(tokenizer)));
        let sample = Sample { name: "llama-like", tokenizer, added: Vec::new() };
        for n_seen in [0, 2] {
            let (tokens, counts) = encode(&sample, text(), &[]);
            assert_eq!((tokens, counts.hits), (whole.clone(), if is_cut { n_seen } else { 0 }), "{bos:?}");
        }
    }
}

/// Returns a conversation of the demo model: a first message of about `n_tokens`, and short turns.
fn conversation(n_tokens: usize, n_turns: usize) -> String {
    let document: Vec<String> =
        (0..n_tokens / 12).map(|nth| format!("Line {nth} of a long text.\n")).collect();
    let mut text = format!("<|begin|><|user|>{}<|end|>", document.concat());
    for nth in 1..n_turns {
        text += &format!("<|assistant|>Answer {nth}.<|end|><|user|>Question {nth}?<|end|>");
    }
    text + "<|assistant|>"
}

#[test]
fn the_tenth_turn_of_a_long_conversation_tokenizes_its_own_text_only() {
    let sample = Sample::new("demo", &parsed(DEMO));
    let encode = |n_turns| {
        let text = PromptText::Rendered(conversation(60_000, n_turns));
        let begin = tokio::time::Instant::now();
        let (tokens, counts) = encode(&sample, text, &[]);
        (tokens, counts, begin.elapsed())
    };
    let (_, first, first_took) = encode(1);
    for n_turns in 2..10 {
        encode(n_turns);
    }
    let (tokens, tenth, tenth_took) = encode(10);
    println!(
        "{} tokens; first turn: {} bytes tokenized in {first_took:?}; tenth: {} in {tenth_took:?}",
        tokens.len(),
        first.tokenized_bytes,
        tenth.tokenized_bytes
    );
    assert!(tokens.len() >= 60_000, "{}", tokens.len());
    let own = "<|assistant|>Answer 9.<|user|>Question 9?".len();
    assert_eq!((tenth.misses, tenth.tokenized_bytes), (2, own), "of {} bytes", first.tokenized_bytes);
    assert!(tenth_took < first_took / 10, "{tenth_took:?} and {first_took:?}");
}

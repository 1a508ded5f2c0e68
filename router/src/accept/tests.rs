use super::*;
use crate::text::tokenizer::END;

fn acceptor() -> Acceptor {
    Acceptor::new(World::seeded(1), Duration::from_millis(600_000))
}

fn model() -> RouterModel {
    RouterModel::mock("mock", 100)
}

fn caller(acceptor: &Acceptor) -> Caller {
    acceptor.caller(RequestId::new("r"), None, None, Priority::default()).expect("nothing to refuse")
}

fn accept(tokens: Vec<Vec<TokenId>>, wishes: &Wishes) -> Result<Accepted, AcceptError> {
    let acceptor = acceptor();
    acceptor.accept(&model(), Inputs { param: "prompt", tokens }, wishes, &caller(&acceptor))
}

fn tokens(n: usize) -> Vec<TokenId> {
    vec![TokenId(7); n]
}

fn one(wishes: &Wishes) -> Prompt {
    accept(vec![tokens(10)], wishes).expect("accepted").prompts.remove(0)
}

#[tokio::test(start_paused = true)]
async fn a_request_that_wishes_nothing_gets_the_models_defaults() {
    let prompt = one(&Wishes::default());
    assert_eq!(prompt.tokens.len(), 10);
    assert_eq!(prompt.n_generated, 0);
    assert_eq!(prompt.stop, StopRules { max_tokens: 90, ..StopRules::default() });
    assert_eq!(Sampling { seed: 0, ..prompt.sampling }, Sampling::default());
    assert_eq!(prompt.tenant, TenantId::default());
    assert_eq!(World::seeded(1).left(prompt.deadline), Duration::from_millis(600_000));
}

#[tokio::test(start_paused = true)]
async fn wishes_are_granted() {
    let prompt = one(&Wishes {
        max_tokens: MaxTokens::Asked { tokens: 90, param: "max_tokens" },
        min_tokens: 90,
        temperature: Some(2.0),
        top_p: Some(0.5),
        top_k: Some(-1),
        logit_bias: vec![(END, -100.0)],
        seed: Some(u64::MAX),
        logprobs: Some(20),
        stop_tokens: vec![TokenId(3)],
        ignore_eos: true,
        ..Wishes::default()
    });
    let stop = StopRules { max_tokens: 90, min_tokens: 90, stop_tokens: vec![TokenId(3)], ignore_eos: true };
    assert_eq!(prompt.stop, stop);
    let sampling = Sampling {
        temperature: 2.0,
        top_p: 0.5,
        logit_bias: vec![(END, -100.0)],
        seed: u64::MAX,
        logprobs: Some(20),
        ..Sampling::default()
    };
    assert_eq!(prompt.sampling, sampling);
}

#[tokio::test(start_paused = true)]
async fn what_nobody_asked_for_gives_way_to_the_context() {
    let wishes = Wishes { max_tokens: MaxTokens::AtMost(16), ..Wishes::default() };
    let accepted = accept(vec![tokens(10), tokens(95)], &wishes).expect("accepted");
    let max_tokens: Vec<u32> = accepted.prompts.iter().map(|prompt| prompt.stop.max_tokens).collect();
    assert_eq!(max_tokens, [16, 5]);
}

#[tokio::test(start_paused = true)]
async fn bad_wishes_name_their_field() {
    let asked = |tokens| MaxTokens::Asked { tokens, param: "max_completion_tokens" };
    let bad = |change: fn(&mut Wishes)| {
        let mut wishes = Wishes::default();
        change(&mut wishes);
        accept(vec![tokens(10)], &wishes).expect_err("refused").to_string()
    };
    type Change = fn(&mut Wishes);
    let table: [(Change, &str); 16] = [
        (|wishes| wishes.n = 0, "n: from 1 to 8, not 0"),
        (|wishes| wishes.n = 9, "n: from 1 to 8, not 9"),
        (|wishes| wishes.temperature = Some(-0.5), "temperature: from 0 to 2, not -0.5"),
        (|wishes| wishes.temperature = Some(f32::NAN), "temperature: from 0 to 2, not NaN"),
        (|wishes| wishes.top_p = Some(2.0), "top_p: above 0 and at most 1, not 2"),
        (|wishes| wishes.top_p = Some(0.0), "top_p: above 0 and at most 1, not 0"),
        (|wishes| wishes.top_k = Some(-2), "top_k: a count, or -1 for all, not -2"),
        (|wishes| wishes.min_p = Some(1.5), "min_p: from 0 to 1, not 1.5"),
        (|wishes| wishes.repetition_penalty = Some(0.0), "repetition_penalty: above 0 and at most 10, not 0"),
        (|wishes| wishes.presence_penalty = Some(3.0), "presence_penalty: from -2 to 2, not 3"),
        (|wishes| wishes.frequency_penalty = Some(-3.0), "frequency_penalty: from -2 to 2, not -3"),
        (|wishes| wishes.logprobs = Some(21), "top_logprobs: from 0 to 20, not 21"),
        (|wishes| wishes.min_tokens = 91, "min_tokens: 91 are more than the 90 at most"),
        (
            |wishes| wishes.logit_bias = vec![(TokenId(261), 1.0)],
            "logit_bias: token 261 is not in the vocabulary of 261",
        ),
        (|wishes| wishes.logit_bias = vec![(TokenId(1), 101.0)], "logit_bias: from -100 to 100, not 101"),
        (
            |wishes| wishes.stop_tokens = vec![TokenId(1); 65],
            "stop_token_ids: at most 64 stop tokens, not 65",
        ),
    ];
    for (change, expected) in table {
        assert_eq!(bad(change), expected);
    }
    let max_tokens = |tokens_asked| {
        let wishes = Wishes { max_tokens: asked(tokens_asked), ..Wishes::default() };
        accept(vec![tokens(10)], &wishes).expect_err("refused")
    };
    assert_eq!(max_tokens(0).to_string(), "max_completion_tokens: at least 1 token");
    assert!(matches!(max_tokens(91), AcceptError::TooLong { param, .. } if param == "max_completion_tokens"));
}

#[tokio::test(start_paused = true)]
async fn prompts_are_bounded() {
    for (inputs, expected) in [
        (vec![], "prompt: from 1 to 32 prompts, not 0"),
        (vec![tokens(1); 33], "prompt: from 1 to 32 prompts, not 33"),
        (vec![tokens(1), vec![]], "prompt: a prompt has at least one token"),
        (vec![vec![TokenId(261)]], "prompt: token 261 is not in the vocabulary of 261"),
        (vec![tokens(100)], "the prompt has 100 tokens, which leaves no room in the model's context of 100"),
    ] {
        assert_eq!(accept(inputs, &Wishes::default()).expect_err("refused").to_string(), expected);
    }
    assert!(accept(vec![tokens(99)], &Wishes::default()).is_ok(), "room for one token");
    let many = Wishes { n: 3, ..Wishes::default() };
    assert_eq!(accept(vec![tokens(1); 32], &many).expect_err("96 answers").param(), "n");
}

#[tokio::test(start_paused = true)]
async fn answers_differ_in_id_and_seed_only() {
    let wishes = Wishes { n: 2, seed: Some(u64::MAX), ..Wishes::default() };
    let prompts = accept(vec![tokens(1), tokens(2)], &wishes).expect("accepted").prompts;
    let seen: Vec<(&str, u64, usize)> = prompts
        .iter()
        .map(|prompt| (prompt.id.as_str(), prompt.sampling.seed, prompt.tokens.len()))
        .collect();
    assert_eq!(seen, [("r-0", u64::MAX, 1), ("r-1", 0, 1), ("r-2", u64::MAX, 2), ("r-3", 0, 2)]);
    assert_eq!(one(&Wishes::default()).id.as_str(), "r", "a single prompt bears the request's own id");
}

#[tokio::test(start_paused = true)]
async fn callers() {
    let acceptor = acceptor();
    assert_eq!(acceptor.request_id(Some("trace-1.a:b_c")).as_str(), "trace-1.a:b_c");
    for insane in ["", "a b", "a\nb", "ü", "x".repeat(129).as_str()] {
        assert!(acceptor.request_id(Some(insane)).as_str().starts_with("req-"), "{insane:?}");
    }
    let caller = |tenant, timeout| acceptor.caller(RequestId::new("r"), tenant, timeout, Priority(3));
    let accepted = caller(Some("acme"), Some(Duration::from_millis(5))).expect("sane");
    assert_eq!(accepted.tenant, TenantId::new("acme"));
    assert_eq!(accepted.deadline, World::seeded(1).deadline_in(Duration::from_millis(5)));
    for timeout in [Duration::ZERO, TIMEOUT_MAX + Duration::from_millis(1)] {
        assert_eq!(caller(None, Some(timeout)).expect_err("refused").param(), "x-baton-timeout-ms");
    }
    assert_eq!(caller(Some(""), None).expect_err("refused").param(), "x-baton-tenant");
}

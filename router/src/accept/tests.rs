use super::*;
use crate::tenants::{Account, TenantLimits};
use crate::text::PromptText;
use crate::text::tokenizer::END;

fn acceptor() -> Acceptor {
    let metrics = RouterMetrics::new(&chassis::metrics::Metrics::new("router"));
    Acceptor::new(World::seeded(1), Deadlines::default(), metrics)
}

fn model() -> ServedModel {
    ServedModel::mock("mock", 100)
}

fn caller(acceptor: &Acceptor) -> Caller {
    let client = acceptor.client(&Claims::default()).expect("it claims nothing");
    acceptor.caller(RequestId::new("r"), client, None).expect("nothing to refuse")
}

fn accept(tokens: Vec<Vec<TokenId>>, params: &SamplingParams) -> Result<AcceptedRequest, AcceptError> {
    let acceptor = acceptor();
    acceptor.accept(&model(), Inputs { param: "prompt", tokens }, params, &caller(&acceptor))
}

fn tokens(n: usize) -> Vec<TokenId> {
    vec![TokenId(7); n]
}

fn one(params: &SamplingParams) -> Prompt {
    accept(vec![tokens(10)], params).expect("accepted").prompts.remove(0)
}

#[tokio::test(start_paused = true)]
async fn a_request_without_sampling_fields_gets_the_models_defaults() {
    let prompt = one(&SamplingParams::default());
    assert_eq!(prompt.tokens.len(), 10);
    assert_eq!(prompt.n_generated, 0);
    assert_eq!(prompt.stop, StopRules { max_tokens: 90, ..StopRules::default() });
    assert_eq!(Sampling { seed: 0, ..prompt.sampling }, Sampling::default());
    assert_eq!(prompt.tenant, TenantId::default());
    assert_eq!(World::seeded(1).left(prompt.deadline), Duration::from_millis(600_000));
}

#[tokio::test(start_paused = true)]
async fn sampling_fields_are_used() {
    let prompt = one(&SamplingParams {
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
        ..SamplingParams::default()
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

/// Makes a model with the demo model's tokenizer.
fn demo() -> ServedModel {
    let json = include_bytes!("../../../models/demo/tokenizer.json");
    let tokenizer = crate::text::tokenizer::HuggingFace::new(json).expect("the demo model's");
    let tokenizer = crate::text::Tokenizer::HuggingFace(Box::new(tokenizer)).into();
    ServedModel { tokenizer, ..model() }
}

#[tokio::test]
async fn requests_find_pieces_of_their_tenant_and_salt_only() {
    let (page, demo) = (chassis::metrics::Metrics::new("router"), demo());
    let acceptor = Acceptor::new(World::seeded(1), Deadlines::default(), RouterMetrics::new(&page));
    let tokenize = async |tenant: &str, salt: Option<&str>| {
        let mut caller = caller(&acceptor);
        caller.client.tenant = TenantId::new(tenant);
        let cache_salt = cache_salt(salt.map(str::to_owned)).expect("short");
        let params = SamplingParams { cache_salt, ..SamplingParams::default() };
        let text = PromptText::Rendered("<|user|>a question".to_owned());
        let asked = AskedInputs { param: "messages", prompts: vec![AskedPrompt::Text(text)] };
        acceptor.tokenized(&demo, asked, &params, &caller).await.map(|inputs| inputs.tokens.concat())
    };
    let expected = demo.tokenizer.encode("<|user|>a question").expect("it encodes");
    for (nth, (tenant, salt)) in
        [("a", None), ("b", None), ("a", Some("salt")), ("b", Some("salt"))].into_iter().enumerate()
    {
        for _ in 0..2 {
            assert_eq!(tokenize(tenant, salt).await, Ok(expected.clone()));
        }
        for found in ["no", "yes"] {
            let line = format!("baton_router_text_pieces_total{{found=\"{found}\"}} {}\n", nth + 1);
            assert!(page.page().contains(&line), "{line} for {tenant} with {salt:?}");
        }
    }
}

#[tokio::test]
async fn a_grammar_is_checked_once_and_contradicts_no_other_field() {
    let (acceptor, demo) = (acceptor(), demo());
    let with = |grammar| SamplingParams {
        grammar: Some(AskedGrammar::new("guided_regex", grammar)),
        ..SamplingParams::default()
    };
    let accept = async |model: &ServedModel, params: &SamplingParams| {
        let caller = caller(&acceptor);
        acceptor.check_grammar(model, params, &caller).await?;
        let inputs = Inputs { param: "prompt", tokens: vec![tokens(10)] };
        Ok(acceptor.accept(model, inputs, params, &caller)?)
    };
    let good = with(grammar::sources::regex("a+"));
    for _ in 0..2 {
        let prompt = accept(&demo, &good).await.expect("accepted").prompts.remove(0);
        assert_eq!(prompt.sampling.grammar, Some(grammar::sources::regex("a+")));
    }
    for (model, params, param) in [
        (&demo, with(grammar::sources::regex("(")), "guided_regex"),
        (&model(), good.clone(), "guided_regex"),
        (&demo, SamplingParams { ignore_eos: true, ..good.clone() }, "ignore_eos"),
        (&demo, SamplingParams { min_tokens: 1, ..good.clone() }, "min_tokens"),
    ] {
        let error = accept(model, &params).await.expect_err("it is refused by name");
        assert!(matches!(&error, RequestError::Accept(error) if error.param() == param), "{error}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_cache_salt_is_used_and_bounded() {
    assert_eq!(one(&SamplingParams::default()).cache_salt, CacheSalt::default());
    assert_eq!(cache_salt(None), Ok(CacheSalt::default()));
    let longest = "s".repeat(CACHE_SALT_BYTES_MAX);
    let salt = cache_salt(Some(longest.clone())).expect("the longest");
    let params = SamplingParams { cache_salt: salt, ..SamplingParams::default() };
    assert_eq!(one(&params).cache_salt.as_str(), longest);
    for (n_bytes, reason) in [(0, "from 1 to 256 bytes, not 0"), (257, "from 1 to 256 bytes, not 257")] {
        let refused = cache_salt(Some("s".repeat(n_bytes))).expect_err("its length is wrong");
        assert_eq!(refused.to_string(), format!("cache_salt: {reason}"));
    }
}

#[tokio::test(start_paused = true)]
async fn a_default_token_limit_shrinks_to_the_context() {
    let params = SamplingParams { max_tokens: MaxTokens::AtMost(16), ..SamplingParams::default() };
    let accepted = accept(vec![tokens(10), tokens(95)], &params).expect("accepted");
    let max_tokens: Vec<u32> = accepted.prompts.iter().map(|prompt| prompt.stop.max_tokens).collect();
    assert_eq!(max_tokens, [16, 5]);
}

#[tokio::test(start_paused = true)]
async fn errors_of_bad_values_name_their_field() {
    let asked = |tokens| MaxTokens::Asked { tokens, param: "max_completion_tokens" };
    let bad = |change: fn(&mut SamplingParams)| {
        let mut params = SamplingParams::default();
        change(&mut params);
        accept(vec![tokens(10)], &params).expect_err("refused").to_string()
    };
    type Change = fn(&mut SamplingParams);
    let table: [(Change, &str); 16] = [
        (|params| params.n = 0, "n: from 1 to 128, not 0"),
        (|params| params.n = 129, "n: from 1 to 128, not 129"),
        (|params| params.temperature = Some(-0.5), "temperature: from 0 to 2, not -0.5"),
        (|params| params.temperature = Some(f32::NAN), "temperature: from 0 to 2, not NaN"),
        (|params| params.top_p = Some(2.0), "top_p: above 0 and at most 1, not 2"),
        (|params| params.top_p = Some(0.0), "top_p: above 0 and at most 1, not 0"),
        (|params| params.top_k = Some(-2), "top_k: a count, or -1 for all, not -2"),
        (|params| params.min_p = Some(1.5), "min_p: from 0 to 1, not 1.5"),
        (|params| params.repetition_penalty = Some(0.001), "repetition_penalty: from 0.01 to 10, not 0.001"),
        (|params| params.presence_penalty = Some(3.0), "presence_penalty: from -2 to 2, not 3"),
        (|params| params.frequency_penalty = Some(-3.0), "frequency_penalty: from -2 to 2, not -3"),
        (|params| params.logprobs = Some(21), "top_logprobs: from 0 to 20, not 21"),
        (|params| params.min_tokens = 91, "min_tokens: 91 is more than the answer's limit of 90 tokens"),
        (
            |params| params.logit_bias = vec![(TokenId(261), 1.0)],
            "logit_bias: token 261 is not in the vocabulary of 261",
        ),
        (|params| params.logit_bias = vec![(TokenId(1), 101.0)], "logit_bias: from -100 to 100, not 101"),
        (
            |params| params.stop_tokens = vec![TokenId(1); 65],
            "stop_token_ids: at most 64 stop tokens, not 65",
        ),
    ];
    for (change, expected) in table {
        assert_eq!(bad(change), expected);
    }
    let max_tokens = |tokens_asked| {
        let params = SamplingParams { max_tokens: asked(tokens_asked), ..SamplingParams::default() };
        accept(vec![tokens(10)], &params).expect_err("refused")
    };
    assert_eq!(max_tokens(0).to_string(), "max_completion_tokens: at least 1 token");
    assert!(matches!(max_tokens(91), AcceptError::TooLong { param, .. } if param == "max_completion_tokens"));
}

#[tokio::test(start_paused = true)]
async fn prompts_are_bounded() {
    for (inputs, expected) in [
        (vec![], "prompt: from 1 to 32 prompts, not 0"),
        (vec![tokens(1); 33], "prompt: from 1 to 32 prompts, not 33"),
        (vec![tokens(1), vec![]], "prompt: the prompt is empty: it needs at least one token"),
        (vec![vec![TokenId(261)]], "prompt: token 261 is not in the vocabulary of 261"),
        (vec![tokens(100)], "the prompt has 100 tokens, which leaves no room in the model's context of 100"),
    ] {
        assert_eq!(accept(inputs, &SamplingParams::default()).expect_err("refused").to_string(), expected);
    }
    assert!(accept(vec![tokens(99)], &SamplingParams::default()).is_ok(), "room for one token");
    let many = SamplingParams { n: 5, ..SamplingParams::default() };
    assert_eq!(accept(vec![tokens(1); 32], &many).expect_err("160 answers").param(), "n");
}

#[tokio::test(start_paused = true)]
async fn answers_that_never_run_together_are_refused_by_n() {
    let acceptor = acceptor().with_requests_max(4);
    let accept = |n, caller: &Caller| {
        let params = SamplingParams { n, ..SamplingParams::default() };
        acceptor.accept(&model(), Inputs { param: "prompt", tokens: vec![tokens(1)] }, &params, caller)
    };
    let caller = caller(&acceptor);
    assert_eq!(accept(4, &caller).expect("as many as run together").prompts.len(), 4);
    let error = accept(5, &caller).expect_err("more than ever run together");
    assert_eq!(error.to_string(), "n: 5 answers are more than the 4 requests of router.requests_max");
}

#[tokio::test(start_paused = true)]
async fn answers_differ_in_id_and_seed_only() {
    let params = SamplingParams { n: 2, seed: Some(u64::MAX), ..SamplingParams::default() };
    let prompts = accept(vec![tokens(1), tokens(2)], &params).expect("accepted").prompts;
    let seen: Vec<(&str, u64, usize)> = prompts
        .iter()
        .map(|prompt| (prompt.id.as_str(), prompt.sampling.seed, prompt.tokens.len()))
        .collect();
    assert_eq!(seen, [("r-0", u64::MAX, 1), ("r-1", 0, 1), ("r-2", u64::MAX, 2), ("r-3", 0, 2)]);
    assert_eq!(
        one(&SamplingParams::default()).id.as_str(),
        "r",
        "a single prompt bears the request's own id"
    );
}

#[tokio::test(start_paused = true)]
async fn callers() {
    let acceptor = acceptor();
    assert_eq!(acceptor.request_id(Some("trace-1.a:b_c")).as_str(), "trace-1.a:b_c");
    for insane in ["", "a b", "a\nb", "ü", "x".repeat(129).as_str()] {
        assert!(acceptor.request_id(Some(insane)).as_str().starts_with("req-"), "{insane:?}");
    }
    let client = acceptor.client(&Claims::default()).expect("it claims nothing");
    let caller = |timeout| acceptor.caller(RequestId::new("r"), client.clone(), timeout);
    let accepted = caller(Some(Duration::from_millis(5))).expect("sane");
    assert_eq!(accepted.client.tenant, TenantId::default());
    assert_eq!(accepted.deadline, World::seeded(1).deadline_in(Duration::from_millis(5)));
    assert_eq!(caller(Some(Duration::ZERO)).expect_err("refused").param(), "x-baton-timeout-ms");
    let longest = World::seeded(1).deadline_in(Deadlines::default().longest);
    assert_eq!(caller(Some(Duration::MAX)).expect("bounded").deadline, longest);
}

#[tokio::test(start_paused = true)]
async fn a_tenants_context_bounds_its_requests() {
    let limits = TenantLimits { context_tokens_max: NonZeroU32::new(20), ..TenantLimits::default() };
    let account = Some(Arc::new(Account::new(TenantId::new("acme"), limits, None)));
    let acceptor = acceptor();
    let mut caller = caller(&acceptor);
    caller.client.account = account;
    let accept = |n_prompt, max_tokens| {
        let params = SamplingParams { max_tokens, ..SamplingParams::default() };
        let inputs = Inputs { param: "prompt", tokens: vec![tokens(n_prompt)] };
        acceptor
            .accept(&model(), inputs, &params, &caller)
            .map(|accepted| accepted.prompts[0].stop.max_tokens)
    };
    let asked = |tokens| MaxTokens::Asked { tokens, param: "max_tokens" };
    assert_eq!(accept(15, MaxTokens::RestOfContext).expect("it fits"), 5);
    assert_eq!(accept(15, asked(5)).expect("it fits"), 5);
    for (n_prompt, max_tokens, param) in
        [(20, MaxTokens::RestOfContext, "prompt"), (15, asked(6), "max_tokens"), (101, asked(1), "prompt")]
    {
        let error = accept(n_prompt, max_tokens).expect_err("refused");
        assert!(matches!(error, AcceptError::TenantContext { .. }), "{error}");
        assert_eq!(error.param(), param);
        assert!(error.to_string().ends_with("the 20 tokens that the tenant may have"), "{error}");
    }
}

use kernels::cuda::NOWHERE;
use types::BlockIdx;

use super::*;
use crate::sampler::no_token;
use crate::step::{PromptTargets, RowInput, SlotId};

const TABLES: &[&[BlockIdx]] = &[];

fn row<'a>(tokens: &'a [TokenId], prompt_logprobs: Option<PromptTargets<'a>>) -> Row<'a> {
    Row {
        slot: SlotId(1),
        input: RowInput::Tokens(tokens),
        start: 0,
        tables: TABLES,
        prompt_logprobs,
        sample: None,
    }
}

fn tokens(n: u32) -> Vec<TokenId> {
    (0..n).map(TokenId).collect()
}

#[test]
fn each_target_is_predicted_by_the_row_before_it_and_drawn_in_its_group() {
    let (three, two, after) = (tokens(3), tokens(2), [9, 8, 7].map(TokenId));
    let wanted = |n: usize, n_top| Some(PromptTargets { tokens: &after[..n], n_top });
    let rows = [
        row(&three, wanted(3, 20)),
        row(&two, None),
        row(&two, wanted(2, 0)),
        row(&two, wanted(2, 5)),
        row(&two, wanted(1, 1)),
    ];
    let first_rows = [Some(4), Some(7), None, Some(0), Some(2)];
    let targets = Targets::of(&rows, first_rows.into_iter(), 4);
    assert_eq!(targets.ranges(), [0..3, 3..3, 3..3, 3..5, 5..6]);
    let mut words = vec![7777; 6 * TARGET_WORDS];
    targets.write(&mut words);
    assert_eq!(words[..6], [4, 5, 6, 0, 1, 2]);
    assert_eq!(words[6..12], [9, 8, 7, 9, 8, 9]);
    let draws: Vec<&[u32]> = words[12..].chunks(DrawRow::WORDS).collect();
    let places: Vec<u32> = draws.iter().map(|draw| draw[0]).collect();
    assert_eq!(places, [0, 1, 2, 3, 0, 1], "groups of four");
    let n_tops: Vec<u32> = draws.iter().map(|draw| draw[10]).collect();
    assert_eq!(n_tops, [21, 21, 21, 6, 6, 2], "one more than the alternatives");
    assert!(draws.iter().all(|draw| draw[1] == NOWHERE && draw[2] == 0 && draw[12] == 0), "plain draws");
    assert!(words.iter().all(|word| *word != 7777), "every word is written");
}

#[test]
fn a_row_has_no_more_targets_than_tokens() {
    let (one, after) = (tokens(1), tokens(3));
    let rows = [row(&one, Some(PromptTargets { tokens: &after, n_top: 1 }))];
    assert_eq!(Targets::of(&rows, [Some(0)].into_iter(), 4).len(), 1);
    let rows = [row(&one, None)];
    assert!(Targets::of(&rows, [Some(0)].into_iter(), 4).is_empty());
}

#[test]
fn a_target_is_ranked_among_all_tokens() {
    let outcome = Outcome { token: 3, best: 2.0, chosen: 2.0, total: 2.0, top: vec![(3, 2.0), (5, 1.0)] };
    let half = -2.0_f32.ln();
    let found = prompt_logprob(&outcome, Standing { n_better: 6, logit: -1.0 }).expect("it is finite");
    assert_eq!(found.rank, 7);
    assert_eq!(found.logprobs.chosen, half - 3.0);
    assert_eq!(found.logprobs.top, [(TokenId(3), half), (TokenId(5), half - 1.0)]);
    let impossible = Standing { n_better: 9, logit: f32::NEG_INFINITY };
    let found = prompt_logprob(&outcome, impossible).expect("the best logit is finite");
    assert_eq!((found.logprobs.chosen, found.rank), (f32::NEG_INFINITY, 10));
    let broken = Outcome { token: NOWHERE, ..outcome };
    assert_eq!(prompt_logprob(&broken, Standing { n_better: 0, logit: 0.0 }), Err(no_token()));
}

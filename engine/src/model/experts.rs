//! A feed-forward layer of experts. A router chooses the experts of each token.

use super::config::ModelConfig;
use super::mixture::Mixture;
use super::mlp::{Mlp, MlpShape};
use super::nn::{HasBias, Linear};
use super::pass::{Pass, ScaledRow};
use super::tensor::Tensor;
use crate::error::LoadError;
use crate::load::Weights;

#[derive(Debug)]
pub(super) struct Experts {
    router: Linear,
    experts: Vec<Mlp>,
    rule: ChoiceRule,
}

/// How the experts of a row are chosen.
#[derive(Clone, Copy, Debug)]
struct ChoiceRule {
    per_token: usize,
    /// Whether the weights of a row's experts add up to one.
    is_normalized: bool,
}

/// The experts of one row.
#[derive(Debug)]
struct Chosen {
    /// The experts with their weights, the one with the greatest score first.
    experts: Vec<(usize, f32)>,
    /// By how much the score of the last expert exceeds that of the next one; infinite if all experts are chosen.
    lead: f32,
}

/// An expert that computes a row, and its weight in the row's sum.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Choice {
    expert: usize,
    row: ScaledRow,
}

impl Experts {
    /// `weights` are those of the layer.
    pub(super) fn load(
        weights: &Weights<'_>,
        config: &ModelConfig,
        mixture: &Mixture,
    ) -> Result<Self, LoadError> {
        let router = weights.under(&mixture.router()).in_f32("weight", mixture.n_experts, config.hidden)?;
        let shape =
            MlpShape { hidden: config.hidden, intermediate: mixture.intermediate, has_bias: HasBias(false) };
        let expert = |nth: usize| {
            let matrices = mixture.style.matrices.map(|matrix| mixture.expert(nth, matrix));
            Mlp::load(weights, shape, matrices.each_ref().map(String::as_str))
        };
        Ok(Self {
            router: Linear { weight: router, bias: None },
            experts: (0..mixture.n_experts).map(expert).collect::<Result<_, _>>()?,
            rule: ChoiceRule { per_token: mixture.per_token, is_normalized: mixture.is_normalized },
        })
    }

    /// Computes the sum of each row's experts: (tokens, hidden), or this rank's share of the columns.
    ///
    /// Every rank has the same rows and scores, and so makes the same choices. Each row sums its experts in ascending
    /// order of the expert index, so its bits do not depend on the other rows of the batch.
    pub(super) fn forward(&self, x: &Tensor, pass: &Pass<'_>) -> Tensor {
        let scores = pass.linear(x, &self.router);
        let scores = pass.whole(scores, self.experts.len()); // (tokens, experts)
        let mut out = pass.zeroes(x.n_rows(), x.width());
        for of_one in self.choices(&scores, pass).chunk_by(|one, next| one.expert == next.expert) {
            let rows: Vec<ScaledRow> = of_one.iter().map(|choice| choice.row).collect();
            let y = self.experts[of_one[0].expert].forward(&pass.rows(x, &rows), pass);
            pass.add_to_rows(&mut out, &y, &rows);
        }
        out
    }

    /// Returns the choices of all rows, ordered by expert and then by row. Notes the rows' leads in the pass.
    fn choices(&self, scores: &Tensor, pass: &Pass<'_>) -> Vec<Choice> {
        let mut choices = Vec::with_capacity(scores.n_rows() * self.rule.per_token);
        let mut leads = Vec::with_capacity(scores.n_rows());
        for nth in 0..scores.n_rows() {
            let Chosen { experts, lead } = chosen(scores.row(nth), self.rule);
            choices.extend(
                experts.into_iter().map(|(expert, weight)| Choice { expert, row: ScaledRow { nth, weight } }),
            );
            leads.push(lead);
        }
        pass.note_routing_leads(&leads);
        choices.sort_by_key(|choice| (choice.expert, choice.row.nth));
        choices
    }
}

/// Chooses the experts of a row: those with the greatest of the softmax of `scores`. Of equal ones, the first is taken.
fn chosen(scores: &[f32], rule: ChoiceRule) -> Chosen {
    let greatest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let exponentials: Vec<f32> = scores.iter().map(|score| (score - greatest).exp()).collect();
    let total: f32 = exponentials.iter().sum();
    let mut experts: Vec<usize> = (0..scores.len()).collect();
    experts.sort_by(|one, other| exponentials[*other].total_cmp(&exponentials[*one]).then(one.cmp(other)));
    let next = experts.get(rule.per_token).map(|next| scores[*next]);
    experts.truncate(rule.per_token);
    let last = experts.last().map(|last| scores[*last]);
    let lead = last.zip(next).map_or(f32::INFINITY, |(last, next)| (last - next).max(0.0));
    let divisor = match rule.is_normalized {
        true => experts.iter().map(|expert| exponentials[*expert]).sum(),
        false => total,
    };
    let experts = experts.into_iter().map(|expert| (expert, exponentials[expert] / divisor)).collect();
    Chosen { experts, lead }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_experts_are_chosen_with_their_share() {
        let scores = [0.0, f32::ln(3.0), f32::ln(2.0), f32::ln(2.0)]; // softmax: 1/8, 3/8, 2/8, 2/8
        let near = |found: Vec<(usize, f32)>, expected: &[(usize, f32)]| {
            let is_near = |(one, other): (&(usize, f32), &(usize, f32))| {
                one.0 == other.0 && (one.1 - other.1).abs() < 1e-6
            };
            assert!(
                found.len() == expected.len() && found.iter().zip(expected).all(is_near),
                "{found:?}, not {expected:?}"
            );
        };
        let chosen = |scores: &[f32], per_token, is_normalized| {
            chosen(scores, ChoiceRule { per_token, is_normalized }).experts
        };
        near(chosen(&scores, 2, false), &[(1, 0.375), (2, 0.25)]);
        near(chosen(&scores, 2, true), &[(1, 0.6), (2, 0.4)]);
        near(chosen(&scores, 4, true), &[(1, 0.375), (2, 0.25), (3, 0.25), (0, 0.125)]);
        near(chosen(&[5.0], 1, false), &[(0, 1.0)]);
    }

    #[test]
    fn the_lead_is_that_of_the_last_chosen_expert() {
        let lead =
            |scores: &[f32], per_token| chosen(scores, ChoiceRule { per_token, is_normalized: true }).lead;
        assert_eq!(lead(&[1.0, 4.0, 2.5, 0.5], 2), 1.5);
        assert_eq!(lead(&[1.0, 4.0, 1.0], 2), 0.0, "equal scores");
        assert_eq!(lead(&[1.0, 4.0], 2), f32::INFINITY, "all experts are chosen");
    }
}

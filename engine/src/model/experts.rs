//! A feed-forward layer of experts. A router chooses the experts of each token.

use super::config::ModelConfig;
use super::mixture::{GroupLimit, Mixture, Scoring};
use super::mlp::{Mlp, MlpShape};
use super::nn::{HasBias, Linear};
use super::pass::{Pass, ScaledRow};
use super::tensor::Tensor;
use crate::error::LoadError;
use crate::load::Weights;

/// The number that `transformers` adds to a sum of sigmoids before it divides by the sum.
const LEAST_SUM: f32 = 1e-20;

#[derive(Debug)]
pub(super) struct Experts {
    router: Linear,
    /// The correction that is added to scores for the choice; `None`: nothing.
    correction: Option<Vec<f32>>,
    experts: Vec<Mlp>,
    /// The experts that compute every row, as one.
    shared: Option<Mlp>,
    rule: ChoiceRule,
}

/// How the experts of a row are chosen.
#[derive(Clone, Copy, Debug)]
struct ChoiceRule {
    per_token: usize,
    /// Whether the weights of a row's experts add up to one, before scaling.
    is_normalized: bool,
    scoring: Scoring,
    groups: Option<GroupLimit>,
    /// The factor of all weights.
    scaling: f32,
}

/// The experts of one row.
#[derive(Debug)]
struct Chosen {
    /// The experts with their weights, the one with the greatest score first.
    experts: Vec<(usize, f32)>,
    /// The smaller of two differences: between the scores of the last chosen expert and the next expert, and between
    /// those of the last chosen group and the next group. Infinite if all experts are chosen. With softmax, the scores
    /// here are the router's products.
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
        let router = weights.under(&mixture.router());
        let shape =
            MlpShape { hidden: config.hidden, intermediate: mixture.intermediate, has_bias: HasBias(false) };
        let expert = |nth: usize| {
            let matrices = mixture.style.matrices.map(|matrix| mixture.expert(nth, matrix));
            Mlp::load(weights, shape, matrices.each_ref().map(String::as_str))
        };
        let shared = |intermediate| {
            let shape = MlpShape { intermediate, ..shape };
            Mlp::load(&weights.under(&mixture.shared_part()), shape, mixture.style.matrices)
        };
        let Mixture { per_token, is_normalized, groups, scaling, .. } = *mixture;
        Ok(Self {
            router: Linear { weight: router.in_f32("weight", mixture.n_experts, config.hidden)?, bias: None },
            correction: mixture
                .correction()
                .map(|name| weights.vector(&name, mixture.n_experts))
                .transpose()?,
            experts: (0..mixture.n_experts).map(expert).collect::<Result<_, _>>()?,
            shared: mixture.shared.map(shared).transpose()?,
            rule: ChoiceRule { per_token, is_normalized, scoring: mixture.style.scoring, groups, scaling },
        })
    }

    /// Computes the sum of each row's experts: (tokens, hidden), or this rank's share of the columns.
    ///
    /// Every rank has the same rows and scores, and so makes the same choices. Each row sums its experts in ascending
    /// order of the expert index, then the shared ones, so its bits do not depend on the other rows of the batch.
    pub(super) fn forward(&self, x: &Tensor, pass: &Pass<'_>) -> Tensor {
        let scores = pass.linear(x, &self.router);
        let scores = pass.whole(scores, self.experts.len()); // (tokens, experts)
        let mut out = pass.zeroes(x.n_rows(), x.width());
        for of_one in self.choices(&scores, pass).chunk_by(|one, next| one.expert == next.expert) {
            let rows: Vec<ScaledRow> = of_one.iter().map(|choice| choice.row).collect();
            let y = self.experts[of_one[0].expert].forward(&pass.rows(x, &rows), pass);
            pass.add_to_rows(&mut out, &y, &rows);
        }
        if let Some(shared) = &self.shared {
            pass.add(&mut out, &shared.forward(x, pass));
        }
        out
    }

    /// Returns the choices of all rows, ordered by expert and then by row. Notes the rows' leads in the pass.
    fn choices(&self, scores: &Tensor, pass: &Pass<'_>) -> Vec<Choice> {
        let mut choices = Vec::with_capacity(scores.n_rows() * self.rule.per_token);
        let mut leads = Vec::with_capacity(scores.n_rows());
        for nth in 0..scores.n_rows() {
            let Chosen { experts, lead } = self.rule.chosen(scores.row(nth), self.correction.as_deref());
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

/// The scores by which experts are chosen, or groups of experts.
#[derive(Clone, Copy, Debug)]
struct Scores<'a> {
    /// The greatest are chosen. If scores are equal, the first is.
    ranks: &'a [f32],
    /// The numbers whose differences are leads. They have the order of the others.
    leads: &'a [f32],
}

impl ChoiceRule {
    /// Chooses the experts of a row. `products` are those of the router.
    fn chosen(&self, products: &[f32], correction: Option<&[f32]>) -> Chosen {
        let scores = self.scoring.scores(products);
        let corrected: Option<Vec<f32>> = correction
            .map(|correction| scores.iter().zip(correction).map(|(score, more)| score + more).collect());
        let ranks = corrected.as_ref().unwrap_or(&scores);
        let by = Scores { ranks, leads: if self.scoring == Scoring::Softmax { products } else { ranks } };
        let (of, of_groups) = match self.groups {
            Some(groups) => self.in_groups(groups, by),
            None => ((0..scores.len()).collect(), f32::INFINITY),
        };
        let (experts, lead) = by.greatest(of, self.per_token);
        let divisor = match (self.is_normalized, self.scoring) {
            (true, Scoring::Softmax) => experts.iter().map(|expert| scores[*expert]).sum(),
            (true, Scoring::Sigmoid) => experts.iter().map(|expert| scores[*expert]).sum::<f32>() + LEAST_SUM,
            (false, Scoring::Softmax) => scores.iter().sum(),
            (false, Scoring::Sigmoid) => 1.0,
        };
        let weight = |expert: usize| scores[expert] / divisor * self.scaling;
        let experts = experts.into_iter().map(|expert| (expert, weight(expert))).collect();
        Chosen { experts, lead: lead.min(of_groups) }
    }

    /// Returns the experts of the groups that a row may have, and the lead of the last of these groups.
    fn in_groups(&self, limit: GroupLimit, by: Scores<'_>) -> (Vec<usize>, f32) {
        let size = by.ranks.len() / limit.n_groups;
        let of_groups = |scores: &[f32]| -> Vec<f32> {
            scores.chunks(size).map(|group| self.scoring.of_group(group)).collect()
        };
        let (ranks, leads) = (of_groups(by.ranks), of_groups(by.leads));
        let groups = Scores { ranks: &ranks, leads: &leads };
        let (mut taken, lead) = groups.greatest((0..limit.n_groups).collect(), limit.per_token);
        taken.sort_unstable();
        (taken.into_iter().flat_map(|group| group * size..(group + 1) * size).collect(), lead)
    }
}

impl Scores<'_> {
    /// Returns the `n` greatest of these, the greatest first, and by how much the last of them exceeds the next.
    fn greatest(&self, mut of: Vec<usize>, n: usize) -> (Vec<usize>, f32) {
        of.sort_by(|one, other| self.ranks[*other].total_cmp(&self.ranks[*one]).then(one.cmp(other)));
        let next = of.get(n).map(|next| self.leads[*next]);
        of.truncate(n);
        let last = of.last().map(|last| self.leads[*last]);
        let lead = last.zip(next).map_or(f32::INFINITY, |(last, next)| (last - next).max(0.0));
        (of, lead)
    }
}

impl Scoring {
    /// Returns a score for each of the router's products; for softmax, its numerators.
    fn scores(self, products: &[f32]) -> Vec<f32> {
        match self {
            Self::Softmax => {
                let greatest = products.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                products.iter().map(|product| (product - greatest).exp()).collect()
            }
            Self::Sigmoid => products.iter().map(|product| 1.0 / (1.0 + (-product).exp())).collect(),
        }
    }

    /// Returns the score of a group of experts: that of the best one, or the sum of the two best.
    fn of_group(self, scores: &[f32]) -> f32 {
        let (mut best, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
        for score in scores {
            if *score > best {
                (best, second) = (*score, best);
            } else {
                second = second.max(*score);
            }
        }
        if self == Self::Sigmoid { best + second } else { best }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn softmax(per_token: usize) -> ChoiceRule {
        let scoring = Scoring::Softmax;
        ChoiceRule { per_token, is_normalized: true, scoring, groups: None, scaling: 1.0 }
    }

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
            ChoiceRule { is_normalized, ..softmax(per_token) }.chosen(scores, None).experts
        };
        near(chosen(&scores, 2, false), &[(1, 0.375), (2, 0.25)]);
        near(chosen(&scores, 2, true), &[(1, 0.6), (2, 0.4)]);
        near(chosen(&scores, 4, true), &[(1, 0.375), (2, 0.25), (3, 0.25), (0, 0.125)]);
        near(chosen(&[5.0], 1, false), &[(0, 1.0)]);
    }

    #[test]
    fn the_lead_is_that_of_the_last_chosen_expert() {
        let lead = |scores: &[f32], per_token| softmax(per_token).chosen(scores, None).lead;
        assert_eq!(lead(&[1.0, 4.0, 2.5, 0.5], 2), 1.5);
        assert_eq!(lead(&[1.0, 4.0, 1.0], 2), 0.0, "equal scores");
        assert_eq!(lead(&[1.0, 4.0], 2), f32::INFINITY, "all experts are chosen");
    }

    #[test]
    fn experts_are_limited_to_the_best_groups() {
        let groups = Some(GroupLimit { n_groups: 3, per_token: 2 });
        // Softmax ranks groups by their best expert: the first and the last one here.
        let rule = ChoiceRule { groups, is_normalized: false, scaling: 2.0, ..softmax(3) };
        let scores = [5.0, 0.0, 3.0, 3.0, 4.0, 1.0];
        let found = rule.chosen(&scores, None);
        let experts: Vec<usize> = found.experts.iter().map(|(expert, _)| *expert).collect();
        assert_eq!((experts, found.lead), (vec![0, 4, 5], 1.0), "expert 5 leads expert 0 of the others by 1");
        let total: f32 = scores.iter().map(|score| (score - 5.0).exp()).sum();
        assert!((found.experts[0].1 - 2.0 / total).abs() < 1e-6, "all experts are in the divisor");
        // Sigmoid ranks groups by their two best experts: the last two here.
        let rule = ChoiceRule { groups, scoring: Scoring::Sigmoid, ..softmax(3) };
        let experts = rule.chosen(&[5.0, -9.0, 3.0, 3.0, 4.0, 1.0], None).experts;
        assert_eq!(experts.iter().map(|(expert, _)| *expert).collect::<Vec<_>>(), [4, 2, 3]);
    }

    #[test]
    fn a_correction_changes_the_choice_and_no_weight() {
        let rule = ChoiceRule { scoring: Scoring::Sigmoid, scaling: 2.5, ..softmax(2) };
        let scores = [0.0, f32::ln(3.0), -f32::ln(3.0)]; // sigmoid: 2/4, 3/4, 1/4
        let found = rule.chosen(&scores, Some(&[0.0, 0.0, 0.5]));
        let experts: Vec<usize> = found.experts.iter().map(|(expert, _)| *expert).collect();
        assert_eq!(experts, [1, 2], "equal scores: the first one");
        assert!(
            (found.experts[0].1 - 2.5 * 0.75).abs() < 1e-6 && (found.experts[1].1 - 2.5 * 0.25).abs() < 1e-6
        );
        assert!((found.lead - 0.25).abs() < 1e-6, "0.75 exceeds 0.5");
        let rule = ChoiceRule { is_normalized: false, ..rule };
        let found = rule.chosen(&scores, Some(&[0.0, 0.0, 0.5]));
        assert!((found.experts[1].1 - 2.5 * 0.25).abs() < 1e-6);
    }
}

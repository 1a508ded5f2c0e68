//! The rule by which a row's experts are chosen, in f64.

use baton_kernels::cuda::{ComputeCard, ExpertChoice, ExpertSizes};
use device::cuda::{Buffer, CudaError};

use super::draw::Draw;

/// Scores that are closer than this may be in another order than in f64.
const NEAR: f64 = 1e-5;

/// A rule: whether scores are corrected sigmoids, the groups, and the factor of all weights.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RuleCase {
    pub(crate) is_corrected: bool,
    pub(crate) groups: Option<[usize; 2]>,
    pub(crate) scaling: f32,
}

/// A rule on both sides.
pub(crate) struct Rule {
    case: RuleCase,
    correction: Vec<f32>,
    there: Buffer<f32>,
}

impl RuleCase {
    pub(crate) const PLAIN: Self = Self { is_corrected: false, groups: None, scaling: 1.0 };

    /// Returns the rules for this number of experts.
    pub(crate) fn all(n_experts: usize, per_row: usize) -> Vec<Self> {
        let fits = |groups: &[usize; 2]| {
            n_experts.is_multiple_of(groups[0])
                && n_experts / groups[0] * groups[1] >= per_row
                && n_experts > groups[0]
        };
        let groups = [[4, 2], [8, 4]].into_iter().filter(fits).map(Some).chain([None]);
        let both = groups
            .flat_map(|groups| [false, true].map(|is_corrected| Self { is_corrected, groups, scaling: 2.5 }));
        [Self::PLAIN].into_iter().chain(both).collect()
    }
}

impl Rule {
    pub(crate) fn draw(card: &ComputeCard, case: RuleCase, n_experts: usize) -> Result<Self, CudaError> {
        let mut draw = Draw::new(n_experts as u64);
        let mut correction: Vec<f32> = (0..n_experts).map(|_| draw.number()).collect();
        // The first and the last expert have equal scores, and must have equal corrections.
        correction[n_experts - 1] = correction[0];
        let there = card.upload(&correction)?;
        Ok(Self { case, correction, there })
    }

    pub(crate) fn choice(&self) -> ExpertChoice<'_> {
        let RuleCase { is_corrected, groups, scaling } = self.case;
        ExpertChoice { correction: is_corrected.then(|| self.there.view()), groups, scaling }
    }

    /// Returns a row's experts with their weights, and whether the choice is certain.
    pub(crate) fn chosen(&self, products: &[f64], sizes: ExpertSizes) -> (Vec<(usize, f64)>, bool) {
        let ExpertSizes { n_experts, per_row, is_normalized, .. } = sizes;
        let greatest = products.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let score = |product: &f64| match self.case.is_corrected {
            true => 1.0 / (1.0 + (-product).exp()),
            false => (product - greatest).exp(),
        };
        let scores: Vec<f64> = products.iter().map(score).collect();
        let corrected = scores.iter().zip(&self.correction).map(|(score, more)| score + f64::from(*more));
        let ranks = if self.case.is_corrected { corrected.collect() } else { scores.clone() };
        // The relative difference of two exponentials is the difference of their products.
        let near = |rank: f64| if self.case.is_corrected { NEAR } else { NEAR * rank };
        let mut is_certain = true;
        let mut best = |ranks: &[f64], of: Vec<usize>, n: usize| {
            let mut order = of;
            order.sort_by(|a, b| ranks[*b].total_cmp(&ranks[*a]).then(a.cmp(b)));
            let is_near = |pair: &[usize]| {
                let lead = ranks[pair[0]] - ranks[pair[1]];
                lead > 0.0 && lead < near(ranks[pair[0]])
            };
            is_certain &= !order.windows(2).take(n).any(is_near);
            order.truncate(n);
            order
        };
        let mut of: Vec<usize> = (0..n_experts).collect();
        if let Some([n_groups, n]) = self.case.groups {
            let size = n_experts / n_groups;
            let of_group = |group: &[f64]| {
                let mut group = group.to_vec();
                group.sort_by(|a, b| b.total_cmp(a));
                if self.case.is_corrected { group[0] + group[1] } else { group[0] }
            };
            let of_groups: Vec<f64> = ranks.chunks(size).map(of_group).collect();
            let kept = best(&of_groups, (0..n_groups).collect(), n);
            of.retain(|expert| kept.contains(&(expert / size)));
        }
        let experts = best(&ranks, of, per_row);
        let divisor: f64 = match (is_normalized, self.case.is_corrected) {
            (true, _) => experts.iter().map(|expert| scores[*expert]).sum(),
            (false, false) => scores.iter().sum(),
            (false, true) => 1.0,
        };
        let weight = |expert: usize| scores[expert] / divisor * f64::from(self.case.scaling);
        (experts.into_iter().map(|expert| (expert, weight(expert))).collect(), is_certain)
    }
}

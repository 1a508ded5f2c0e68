//! Experts in tensors of three dimensions: `experts.gate_up_proj` and `experts.down_proj` hold the matrices of all
//! experts of a layer.

/// The place of an expert's matrix in a tensor of all experts.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct StackedPlace {
    pub(super) tensor: String,
    pub(super) expert: usize,
    pub(super) part: StackedPart,
}

/// The rows of one expert that a matrix has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StackedPart {
    All,
    /// The first half of the rows: gate, before up.
    Gate,
    Up,
}

/// The ends of the names of tensors with all experts.
const GATE_UP: &str = ".experts.gate_up_proj";
const DOWN: &str = ".experts.down_proj";

impl StackedPlace {
    /// Returns where an expert's matrix is in a checkpoint with tensors of three dimensions; `None` if the name is not
    /// an expert's.
    pub(super) fn of(name: &str) -> Option<Self> {
        let (layer, expert) = name.split_once(".experts.")?;
        let (expert, matrix) = expert.split_once('.')?;
        let (end, part) = match matrix {
            "gate_proj.weight" | "w1.weight" => (GATE_UP, StackedPart::Gate),
            "up_proj.weight" | "w3.weight" => (GATE_UP, StackedPart::Up),
            "down_proj.weight" | "w2.weight" => (DOWN, StackedPart::All),
            _ => return None,
        };
        Some(Self { tensor: format!("{layer}{end}"), expert: expert.parse().ok()?, part })
    }

    /// Returns the number of rows that one expert has in the tensor.
    pub(super) fn rows_of_expert(&self, rows: usize) -> usize {
        if self.part == StackedPart::All { rows } else { 2 * rows }
    }

    /// Returns the first row of the matrix, counted over all experts.
    pub(super) fn first_row(&self, rows: usize) -> usize {
        let before = if self.part == StackedPart::Up { rows } else { 0 };
        self.expert * self.rows_of_expert(rows) + before
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrices_of_experts_have_a_place() {
        for (name, tensor, expert, first_row) in [
            ("a.mlp.experts.0.gate_proj.weight", "a.mlp.experts.gate_up_proj", 0, 0),
            ("a.mlp.experts.0.up_proj.weight", "a.mlp.experts.gate_up_proj", 0, 5),
            ("a.mlp.experts.3.gate_proj.weight", "a.mlp.experts.gate_up_proj", 3, 30),
            ("a.moe.experts.3.w3.weight", "a.moe.experts.gate_up_proj", 3, 35),
            ("a.moe.experts.3.w2.weight", "a.moe.experts.down_proj", 3, 15),
        ] {
            let place = StackedPlace::of(name).expect(name);
            assert_eq!(
                (place.tensor.as_str(), place.expert, place.first_row(5)),
                (tensor, expert, first_row)
            );
        }
        for name in ["a.mlp.gate_proj.weight", "a.mlp.experts.gate_up_proj", "a.experts.x.w1.weight"] {
            assert_eq!(StackedPlace::of(name), None, "{name}");
        }
    }
}

//! The processes of one node: which stage and which ranks each of them computes.

use std::ops::Range;

/// The part of a model that one process of a node computes: some ranks of one pipeline stage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessShare {
    pub stage: usize,
    pub ranks: Range<u16>,
}

/// How the stages of a node and their ranks are divided over its processes. Each process has places for one stage.
///
/// Processes have numbers: those of the first stage come first, in the order of their ranks. The last number is the head's,
/// which has the first ranks of the last stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessGrid {
    n_stages: usize,
    n_ranks: u16,
    processes_of_stage: usize,
}

/// The reason why a node's stages and ranks cannot be divided over its processes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GridError {
    #[error(
        "{n_processes} processes for {n_stages} stages: every stage needs as many processes as the others"
    )]
    Stages { n_processes: u16, n_stages: u16 },
    #[error(
        "{processes_of_stage} processes for the {n_ranks} ranks of a stage: each needs as many ranks as the others"
    )]
    Ranks { processes_of_stage: u16, n_ranks: u16 },
}

impl ProcessGrid {
    /// Divides the ranks of each stage evenly over the processes of the stage.
    pub fn new(n_processes: u16, n_stages: u16, n_ranks: u16) -> Result<Self, GridError> {
        let processes_of_stage = n_processes / n_stages.max(1);
        if processes_of_stage == 0 || !n_processes.is_multiple_of(n_stages) {
            return Err(GridError::Stages { n_processes, n_stages });
        }
        if !n_ranks.is_multiple_of(processes_of_stage) {
            return Err(GridError::Ranks { processes_of_stage, n_ranks });
        }
        Ok(Self { n_stages: n_stages.into(), n_ranks, processes_of_stage: processes_of_stage.into() })
    }

    pub fn n_stages(&self) -> usize {
        self.n_stages
    }

    pub fn n_processes(&self) -> usize {
        self.n_stages * self.processes_of_stage
    }

    pub fn processes_of_stage(&self) -> usize {
        self.processes_of_stage
    }

    /// Returns the number of the head.
    pub fn head(&self) -> usize {
        self.n_processes() - 1
    }

    /// Returns the part of the model that a process computes.
    ///
    /// # Panics
    /// If there is no such process.
    pub fn share(&self, process: usize) -> ProcessShare {
        assert!(process < self.n_processes(), "there is no process {process}");
        let in_order = match process {
            head if head == self.head() => self.head_in_order(),
            follower if follower >= self.head_in_order() => follower + 1,
            follower => follower,
        };
        let n_ranks = self.ranks_of_process();
        let first = (in_order % self.processes_of_stage) as u16 * n_ranks;
        ProcessShare { stage: in_order / self.processes_of_stage, ranks: first..first + n_ranks }
    }

    /// Returns the process that has a rank of a stage.
    pub fn process_of(&self, stage: usize, rank: u16) -> usize {
        let of_stage = usize::from(rank) * self.processes_of_stage / usize::from(self.n_ranks);
        match stage * self.processes_of_stage + of_stage {
            head if head == self.head_in_order() => self.head(),
            in_order if in_order > self.head_in_order() => in_order - 1,
            in_order => in_order,
        }
    }

    /// Returns the processes of a stage, in the order of their ranks.
    pub fn of_stage(&self, stage: usize) -> impl Iterator<Item = usize> {
        let n_ranks = self.ranks_of_process();
        (0..self.processes_of_stage as u16).map(move |nth| self.process_of(stage, nth * n_ranks))
    }

    /// Names a process's share for an operator.
    pub fn name(&self, process: usize) -> String {
        let ProcessShare { stage, ranks } = self.share(process);
        match self.processes_of_stage {
            1 => format!("stage {stage}"),
            _ if ranks.len() == 1 => format!("stage {stage}, rank {}", ranks.start),
            _ => format!("stage {stage}, ranks {} to {}", ranks.start, ranks.end - 1),
        }
    }

    fn ranks_of_process(&self) -> u16 {
        self.n_ranks / self.processes_of_stage as u16
    }

    /// Returns the place, in the order of stages and ranks, that the head's process has.
    fn head_in_order(&self) -> usize {
        (self.n_stages - 1) * self.processes_of_stage
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shares(n_processes: u16, n_stages: u16, n_ranks: u16) -> Vec<(usize, Range<u16>)> {
        let grid = ProcessGrid::new(n_processes, n_stages, n_ranks).expect("they divide");
        let shares: Vec<ProcessShare> = (0..grid.n_processes()).map(|process| grid.share(process)).collect();
        for (process, ProcessShare { stage, ranks }) in shares.iter().enumerate() {
            assert!(ranks.clone().all(|rank| grid.process_of(*stage, rank) == process), "process {process}");
        }
        for stage in 0..grid.n_stages() {
            let ranks = grid.of_stage(stage).flat_map(|process| shares[process].ranks.clone());
            assert_eq!(ranks.collect::<Vec<_>>(), (0..n_ranks).collect::<Vec<_>>(), "stage {stage}");
        }
        shares.into_iter().map(|ProcessShare { stage, ranks }| (stage, ranks)).collect()
    }

    #[test]
    fn the_head_has_the_first_ranks_of_the_last_stage_and_the_last_number() {
        assert_eq!(shares(1, 1, 2), [(0, 0..2)]);
        assert_eq!(shares(3, 3, 2), [(0, 0..2), (1, 0..2), (2, 0..2)]);
        assert_eq!(shares(2, 1, 4), [(0, 2..4), (0, 0..2)]);
        assert_eq!(shares(4, 2, 2), [(0, 0..1), (0, 1..2), (1, 1..2), (1, 0..1)]);
        assert_eq!(shares(4, 1, 4), [(0, 1..2), (0, 2..3), (0, 3..4), (0, 0..1)]);
    }

    #[test]
    fn a_process_is_named_by_what_it_computes() {
        let names = |n_processes, n_stages, n_ranks| {
            let grid = ProcessGrid::new(n_processes, n_stages, n_ranks).expect("they divide");
            (0..grid.n_processes()).map(|process| grid.name(process)).collect::<Vec<_>>()
        };
        assert_eq!(names(2, 2, 4), ["stage 0", "stage 1"]);
        assert_eq!(names(2, 1, 4), ["stage 0, ranks 2 to 3", "stage 0, ranks 0 to 1"]);
        assert_eq!(names(2, 1, 2), ["stage 0, rank 1", "stage 0, rank 0"]);
    }

    #[test]
    fn what_does_not_divide_is_refused_with_a_sentence() {
        for (n_processes, n_stages, n_ranks, expected) in [
            (3, 2, 2, "3 processes for 2 stages: every stage needs as many processes as the others"),
            (2, 3, 2, "2 processes for 3 stages: every stage needs as many processes as the others"),
            (3, 1, 2, "3 processes for the 2 ranks of a stage: each needs as many ranks as the others"),
            (4, 1, 2, "4 processes for the 2 ranks of a stage: each needs as many ranks as the others"),
        ] {
            let error = ProcessGrid::new(n_processes, n_stages, n_ranks).expect_err(expected);
            assert_eq!(error.to_string(), expected);
        }
    }
}

//! Finds the highest rate that holds an objective: doubles the rate until the objective fails, then halves
//! the interval.

/// The ratio of the lowest rate that failed to the highest that held, at which the search stops.
const CLOSE_ENOUGH: f64 = 1.05;
const N_PROBES_MAX: usize = 24;

/// The state of a search: chooses the next rate from the results so far, without a server.
#[derive(Clone, Debug, PartialEq)]
pub struct Search {
    first: f64,
    held: Option<f64>,
    broke: Option<f64>,
    n_probes: usize,
}

impl Search {
    pub fn from(first: f64) -> Self {
        Self { first, held: None, broke: None, n_probes: 0 }
    }

    /// Returns the rate to try next; `None` when the answer is close enough.
    pub fn next(&self) -> Option<f64> {
        if self.n_probes >= N_PROBES_MAX {
            return None;
        }
        match (self.held, self.broke) {
            (None, None) => Some(self.first),
            (Some(held), None) => Some(held * 2.0),
            (None, Some(broke)) => (broke > self.first / 1000.0).then_some(broke / 2.0),
            (Some(held), Some(broke)) => (broke / held > CLOSE_ENOUGH).then_some((held * broke).sqrt()),
        }
    }

    pub fn note_held(&mut self, rate: f64) {
        self.n_probes += 1;
        self.held = Some(self.held.map_or(rate, |known| known.max(rate)));
    }

    pub fn note_broke(&mut self, rate: f64) {
        self.n_probes += 1;
        self.broke = Some(self.broke.map_or(rate, |known| known.min(rate)));
    }

    /// Returns the highest rate that held; `None` if none did.
    pub fn answer(&self) -> Option<f64> {
        self.held
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn search(first: f64, limit: f64) -> (Option<f64>, usize) {
        let mut search = Search::from(first);
        while let Some(rate) = search.next() {
            if rate <= limit {
                search.note_held(rate);
            } else {
                search.note_broke(rate);
            }
        }
        (search.answer(), search.n_probes)
    }

    #[test]
    fn the_limit_is_found_from_either_side() {
        for (first, limit) in [(1.0, 37.0), (100.0, 37.0), (1.0, 1.0), (0.5, 900.0), (8.0, 0.3)] {
            let (answer, n_probes) = search(first, limit);
            let answer = answer.expect("some rate holds");
            assert!(answer <= limit && limit / answer <= CLOSE_ENOUGH, "{answer} for {limit}");
            assert!(n_probes <= 16, "{n_probes} probes");
        }
    }

    #[test]
    fn a_server_that_never_holds_ends_the_search_and_so_does_one_that_always_does() {
        assert_eq!(search(1.0, 0.0).0, None);
        assert_eq!(search(1.0, f64::INFINITY).1, N_PROBES_MAX);
    }
}

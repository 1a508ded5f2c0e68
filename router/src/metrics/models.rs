//! The values of the label `model`.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The number of models that are counted by name. A router that has served more counts the others as one,
/// because each name makes new series that stay until the router ends.
const MODELS_MAX: usize = 32;
const OTHER: &str = "other";

/// The names of counted models. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct ModelLabels(Arc<Mutex<BTreeSet<String>>>);

impl ModelLabels {
    /// Returns the model's name if it is counted by name, and otherwise `other`.
    pub(super) fn label(&self, model: &str) -> String {
        let mut names = self.names();
        let name = if names.contains(model) || names.len() < MODELS_MAX { model } else { OTHER };
        if !names.contains(name) {
            names.insert(name.to_owned());
        }
        name.to_owned()
    }

    pub(super) fn all(&self) -> Vec<String> {
        self.names().iter().cloned().collect()
    }

    fn names(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_labels_is_bounded() {
        let labels = ModelLabels::default();
        for nth in 0..2 * MODELS_MAX {
            let name = format!("m{nth}");
            assert_eq!(labels.label(&name), if nth < MODELS_MAX { &name } else { OTHER });
        }
        assert_eq!(labels.label("m0"), "m0");
        assert_eq!(labels.all().len(), MODELS_MAX + 1);
    }
}

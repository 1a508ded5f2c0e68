//! The calls of one answer, as they are written piece by piece.

/// The part of a call that one piece of text adds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallDelta {
    /// The index of the call among the answer's calls.
    pub index: usize,
    /// The id and name, in the first delta of a call.
    pub start: Option<CallStart>,
    /// More of the arguments' JSON.
    pub arguments: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallStart {
    pub id: String,
    pub name: String,
}

/// Makes the ids of an answer's calls.
#[derive(Clone, Copy, Debug)]
pub struct CallIds {
    /// A random number of the request.
    pub seed: u64,
    pub choice: usize,
    /// Whether an id has nine letters and digits, as Mistral's templates demand.
    pub is_short: bool,
}

const SHORT: usize = 9;
const LONG: usize = 24;

impl CallIds {
    fn id(self, nth: usize) -> String {
        let hash = blake3::hash(format!("{} {} {nth}", self.seed, self.choice).as_bytes()).to_hex();
        if self.is_short { hash[..SHORT].to_owned() } else { format!("call_{}", &hash[..LONG]) }
    }
}

/// Writes calls, up to a largest number. Later calls are left out.
#[derive(Debug)]
pub(in crate::text) struct Calls {
    ids: CallIds,
    n: usize,
    max: usize,
    deltas: Vec<CallDelta>,
}

impl Calls {
    pub(in crate::text) fn new(ids: CallIds, max: usize) -> Self {
        Self { ids, n: 0, max, deltas: Vec::new() }
    }

    /// Returns the number of calls that have begun, including those left out.
    pub(super) fn n(&self) -> usize {
        self.n
    }

    pub(super) fn begin(&mut self, name: &str) {
        let index = self.n;
        self.n += 1;
        if index < self.max {
            let start = Some(CallStart { id: self.ids.id(index), name: name.to_owned() });
            self.deltas.push(CallDelta { index, start, arguments: String::new() });
        }
    }

    /// Adds to the arguments of the last call.
    pub(super) fn arguments(&mut self, json: &str) {
        let Some(index) = self.n.checked_sub(1).filter(|index| *index < self.max) else { return };
        match self.deltas.last_mut() {
            Some(last) if last.index == index => last.arguments.push_str(json),
            _ => self.deltas.push(CallDelta { index, start: None, arguments: json.to_owned() }),
        }
    }

    /// Appends a character of the arguments as it is.
    pub(super) fn argument(&mut self, c: char) {
        self.arguments(c.encode_utf8(&mut [0; 4]));
    }

    /// Moves the deltas since the last time to `deltas`.
    pub(super) fn take(&mut self, deltas: &mut Vec<CallDelta>) {
        deltas.append(&mut self.deltas);
    }
}

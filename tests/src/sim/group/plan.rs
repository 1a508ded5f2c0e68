//! The plan of a seed: the processes, the prompts and the faults.

use std::time::Duration;

use super::super::chance::Chance;
use super::super::net::Crash;
use super::reference::{ANSWER_MAX, N_PROMPTS};

/// One seed in this number has faults of processes, and may have more followers. The others have their faults alone, so
/// that each kind of fault stays frequent.
const PROCESS_SEEDS_ONE_IN: u64 = 4;
/// The most followers of a node.
const FOLLOWERS_MAX: u64 = 4;

/// A hold of this length is no silence yet, so the node must continue.
const SHORT_HOLD_MS: u64 = 3_000;
/// A hold of this length is a silence that ends the node.
const LONG_HOLD_MS: u64 = 6_000;

/// A pause of this length is no silence yet, so the node must continue.
pub const SHORT_PAUSE_MS: u64 = 3_000;
/// A pause of this length is a silence that ends the node.
pub const LONG_PAUSE_MS: u64 = 7_000;

/// Links of KV notice a shorter standstill neither as a stall nor as a silence.
pub const NOTICED_AFTER: Duration = Duration::from_millis(1_000);

/// One run: its computations, and the faults meanwhile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    pub n_followers: usize,
    /// The prompts of each wave, as indices of the reference's prompts. The next wave uses the blocks of the last one.
    pub waves: Vec<Vec<usize>>,
    /// The numbers of blocks that steps compute of a prompt, in turn.
    pub chunk_blocks: Vec<u32>,
    /// The numbers of decode steps of prompts, in turn.
    pub answers: Vec<usize>,
    /// The prompts of a wave are divided over so many sets. Steps compute the sets in turn.
    pub n_sets: usize,
    /// How long the processes stay connected after the last wave.
    pub idle: Duration,
    pub faults: Vec<Fault>,
}

/// A fault on the connection of one follower.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    pub follower: usize,
    pub direction: Direction,
    /// The number of the message that it applies to, counted from 0 in its direction.
    pub nth: u64,
    pub what: FaultKind,
}

/// A fault of a process of the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessFault {
    /// All connections of the process end, or stand still if its machine dies.
    Dies(NodeProcess, Crash),
    /// The process stands still for this time, as after SIGSTOP. Its connections stay open.
    Pauses(NodeProcess, Duration),
}

/// A process of the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeProcess {
    Head,
    Follower(usize),
}

/// A direction of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    ToHead,
    ToFollower,
}

/// A fault of one message, or from this message on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    Lose,
    /// The message arrives twice, the second time after this number of further messages.
    Double {
        after: u64,
    },
    /// The message alone arrives later. Others overtake it.
    Late(Duration),
    /// The direction stands still for this time. Nothing is lost.
    Hold(Duration),
    /// The connection ends before this message.
    Cut,
    /// The connection ends in the middle of this message.
    CutInside,
    /// The direction stands still forever, and the connection stays open.
    Silence,
    /// Both directions stand still forever.
    SilenceBothWays,
    /// The message arrives, and this happens to a process.
    Process(ProcessFault),
}

/// Returns whether the plan of `seed` has faults of processes.
pub fn has_process_faults(seed: u64) -> bool {
    seed % PROCESS_SEEDS_ONE_IN == PROCESS_SEEDS_ONE_IN - 1
}

/// Draws the number of followers of a node.
pub fn draw_followers(chance: &mut Chance, seed: u64) -> usize {
    let most = if has_process_faults(seed) { FOLLOWERS_MAX } else { 2 };
    chance.within(1..=most) as usize
}

impl Plan {
    pub fn draw(seed: u64) -> Self {
        let mut chance = Chance::named(seed, "group");
        let n_followers = draw_followers(&mut chance, seed);
        let wave = |chance: &mut Chance| {
            let n = chance.within(1..=3);
            (0..n).map(|_| chance.below(N_PROMPTS as u64) as usize).collect()
        };
        let waves = (0..chance.within(1..=3)).map(|_| wave(&mut chance)).collect();
        let chunk_blocks = (0..chance.within(1..=3)).map(|_| chance.within(1..=2) as u32).collect();
        let answer = |_| if chance.one_in(3) { 0 } else { chance.within(1..=ANSWER_MAX as u64) as usize };
        let answers = (0..3).map(answer).collect();
        let n_sets = chance.within(1..=2) as usize;
        let idle = chance.millis(0..=3_000);
        let faults = match has_process_faults(seed) {
            true => faults_with_process(&mut chance, n_followers),
            false => faults_of_messages(&mut chance, n_followers),
        };
        Self { n_followers, waves, chunk_blocks, answers, n_sets, idle, faults }
    }

    /// Returns whether a process has a pause that can end links of KV.
    pub fn has_noticed_pause(&self) -> bool {
        let is_noticed = |fault: &Fault| match fault.what {
            FaultKind::Process(ProcessFault::Pauses(_, time)) => time > NOTICED_AFTER,
            _ => false,
        };
        self.faults.iter().any(is_noticed)
    }
}

fn faults_of_messages(chance: &mut Chance, n_followers: usize) -> Vec<Fault> {
    // One seed in six has no fault.
    let n_faults = if chance.one_in(6) { 0 } else { chance.within(1..=2) };
    (0..n_faults).map(|_| Fault::draw(chance, n_followers)).collect()
}

/// Draws the fault of a process. One seed in three has the fault of a message too.
fn faults_with_process(chance: &mut Chance, n_followers: usize) -> Vec<Fault> {
    let what = ProcessFault::draw(chance, n_followers);
    let of_process = Fault { what: FaultKind::Process(what), ..Fault::draw(chance, n_followers) };
    let other = chance.one_in(3).then(|| Fault::draw(chance, n_followers));
    // Two silences in a row are a longer one, so a plan with a pause has no other silence.
    let is_silence = |fault: &Fault| matches!(fault.what, FaultKind::Hold(_) | FaultKind::Late(_));
    let other = other.filter(|fault| !(what.is_pause() && is_silence(fault)));
    [of_process].into_iter().chain(other).collect()
}

impl ProcessFault {
    pub fn draw(chance: &mut Chance, n_followers: usize) -> Self {
        let follower = NodeProcess::Follower(chance.below(n_followers as u64) as usize);
        let process = *chance.pick(&[NodeProcess::Head, follower]);
        match chance.below(4) {
            0 => Self::Dies(process, Crash::Process),
            1 => Self::Dies(process, Crash::Machine),
            2 => Self::Pauses(process, chance.millis(10..=SHORT_PAUSE_MS)),
            _ => Self::Pauses(process, chance.millis(LONG_PAUSE_MS..=2 * LONG_PAUSE_MS)),
        }
    }

    pub fn is_pause(&self) -> bool {
        matches!(self, Self::Pauses(..))
    }
}

impl Fault {
    pub fn draw(chance: &mut Chance, n_followers: usize) -> Self {
        let follower = chance.below(n_followers as u64) as usize;
        let direction = *chance.pick(&[Direction::ToHead, Direction::ToFollower]);
        let n_usual = match direction {
            Direction::ToHead => 60,
            Direction::ToFollower => 30,
        };
        Self { follower, direction, nth: chance.below(n_usual), what: FaultKind::draw(chance) }
    }
}

impl FaultKind {
    fn draw(chance: &mut Chance) -> Self {
        match chance.below(11) {
            0 | 1 => Self::Lose,
            2 => Self::Double { after: 0 },
            3 => Self::Double { after: chance.within(1..=8) },
            4 => Self::Late(chance.millis(1..=20)),
            5 => Self::Late(chance.millis(20..=4_000)),
            6 => Self::Hold(chance.millis(1..=SHORT_HOLD_MS)),
            7 => Self::Hold(chance.millis(LONG_HOLD_MS..=2 * LONG_HOLD_MS)),
            8 => *chance.pick(&[Self::Cut, Self::CutInside]),
            9 => Self::Silence,
            _ => Self::SilenceBothWays,
        }
    }
}

//! The plan of a seed: the processes, the landings and the faults.

use std::time::Duration;

use super::super::super::chance::Chance;
use super::super::super::net::Crash;
use super::super::plan::{
    Fault, FaultKind, LONG_PAUSE_MS, NodeProcess, ProcessFault, SHORT_PAUSE_MS, draw_followers,
    has_process_faults,
};
use super::super::reference::{ANSWER_MAX, N_PROMPTS};

/// A landing with this time ends before it, whatever the faults that plans have.
pub const LONG_DEADLINE: Duration = Duration::from_secs(40);
/// The time within which landings and faults begin.
const BEGIN_WITHIN_MS: u64 = 4_000;

/// One run: the landings, and what happens meanwhile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    pub n_followers: usize,
    pub n_senders: usize,
    /// How long each message travels between head and followers.
    pub message_delay: Duration,
    pub landings: Vec<LandingPlan>,
    /// Faults of messages between head and followers.
    pub messages: Vec<Fault>,
    pub faults: Vec<TimedFault>,
}

/// A sequence that a sender sends to the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LandingPlan {
    pub at: Duration,
    pub sender: usize,
    /// The index of the reference's prompt.
    pub prompt: usize,
    /// The number of blocks of a chunk.
    pub chunk_blocks: u32,
    /// The time between two chunks.
    pub pace: Duration,
    /// The landing's deadline.
    pub within: Duration,
    pub cancel: Option<Cancel>,
    /// Whether blocks that the node has of the prompt are used.
    pub cache: CacheUse,
    /// The number of decode steps after the prompt.
    pub n_decoded: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheUse {
    Never,
    IfThere,
}

/// The side that cancels a landing, and the time after its begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cancel {
    Receiver(Duration),
    Sender(Duration),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimedFault {
    pub at: Duration,
    pub what: Event,
}

/// A fault of a process, or between a sender and a process of the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Both directions stand still for this time. Nothing is lost.
    Hold(Path, Duration),
    /// All connections end.
    Reset(Path),
    /// Writes to the process arrive this far apart.
    Trickle(Path, Duration),
    SenderDies(usize, Crash),
    Process(ProcessFault),
    /// In this number of the sender's frames of KV a bit is flipped.
    FlipBits(usize, u32),
    /// The sender's next frame of KV is sent twice.
    DoubleFrame(usize),
    /// The sender's next frame of KV is late.
    LateFrame(usize, Duration),
}

/// A sender, and a process of the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Path {
    pub sender: usize,
    /// `None` is the head.
    pub follower: Option<usize>,
}

impl Plan {
    pub fn draw(seed: u64) -> Self {
        let mut chance = Chance::named(seed, "landings");
        let n_followers = draw_followers(&mut chance, seed);
        let n_senders = chance.within(1..=2) as usize;
        let message_delay = if chance.one_in(3) { Duration::ZERO } else { chance.millis(1..=60) };
        let n_landings = chance.within(3..=8);
        let landings = (0..n_landings).map(|_| LandingPlan::draw(&mut chance, n_senders)).collect();
        // One seed in six has no fault.
        let n_faults = if chance.one_in(6) { 0 } else { chance.within(1..=3) };
        let (mut messages, mut faults) = (Vec::new(), Vec::new());
        for _ in 0..n_faults {
            match chance.below(2) {
                0 => messages.push(message_fault(&mut chance, n_followers)),
                _ => faults.push(TimedFault::draw(&mut chance, n_followers, n_senders)),
            }
        }
        if has_process_faults(seed) {
            faults.insert(0, TimedFault::of_process(&mut chance, n_followers));
        }
        if leave_one_pause(&mut faults) > 0 {
            messages.retain(|fault| !matches!(fault.what, FaultKind::Hold(_)));
        }
        Self { n_followers, n_senders, message_delay, landings, messages, faults }
    }

    /// Returns the time in which the head stands still.
    pub fn head_pauses(&self) -> Duration {
        let pause = |fault: &TimedFault| match fault.what {
            Event::Process(ProcessFault::Pauses(NodeProcess::Head, time)) => Some(time),
            _ => None,
        };
        self.faults.iter().filter_map(pause).sum()
    }
}

/// Leaves one pause, because two silences in a row are a longer one. No process pauses while its dead head must be noticed.
/// Returns the number of pauses before.
fn leave_one_pause(faults: &mut Vec<TimedFault>) -> u32 {
    let head_dies =
        |fault: &TimedFault| matches!(fault.what, Event::Process(ProcessFault::Dies(NodeProcess::Head, _)));
    let pauses_max = u32::from(!faults.iter().any(head_dies));
    let mut n_pauses = 0;
    faults.retain(|fault| {
        let is_pause = matches!(fault.what, Event::Process(what) if what.is_pause());
        n_pauses += u32::from(is_pause);
        !is_pause || n_pauses <= pauses_max
    });
    n_pauses
}

impl LandingPlan {
    /// Makes the plan of a landing that must succeed, after all faults.
    pub fn last() -> Self {
        Self {
            at: Duration::ZERO,
            sender: usize::MAX,
            prompt: N_PROMPTS - 1,
            chunk_blocks: 2,
            pace: Duration::ZERO,
            within: LONG_DEADLINE,
            cancel: None,
            cache: CacheUse::IfThere,
            n_decoded: ANSWER_MAX,
        }
    }

    fn draw(chance: &mut Chance, n_senders: usize) -> Self {
        let within = if chance.one_in(5) { chance.millis(20..=1_500) } else { LONG_DEADLINE };
        let cancel = match chance.below(6) {
            0 => Some(Cancel::Receiver(chance.millis(0..=800))),
            1 => Some(Cancel::Sender(chance.millis(0..=800))),
            _ => None,
        };
        Self {
            at: chance.millis(0..=BEGIN_WITHIN_MS),
            sender: chance.below(n_senders as u64) as usize,
            prompt: chance.below(N_PROMPTS as u64) as usize,
            chunk_blocks: chance.within(1..=2) as u32,
            pace: chance.millis(0..=120),
            within,
            cancel,
            cache: *chance.pick(&[CacheUse::Never, CacheUse::IfThere]),
            n_decoded: if chance.one_in(4) { 0 } else { chance.within(1..=ANSWER_MAX as u64) as usize },
        }
    }
}

/// Draws a fault of a message. The first messages of both directions make the node, and have faults in the other simulation.
fn message_fault(chance: &mut Chance, n_followers: usize) -> Fault {
    let fault = Fault::draw(chance, n_followers);
    Fault { nth: 2 + fault.nth, ..fault }
}

impl TimedFault {
    fn of_process(chance: &mut Chance, n_followers: usize) -> Self {
        let what = Event::Process(ProcessFault::draw(chance, n_followers));
        Self { at: chance.millis(0..=BEGIN_WITHIN_MS), what }
    }

    fn draw(chance: &mut Chance, n_followers: usize, n_senders: usize) -> Self {
        let sender = chance.below(n_senders as u64) as usize;
        let follower = chance.below(n_followers as u64) as usize;
        let path = Path { sender, follower: (!chance.one_in(4)).then_some(follower) };
        let process = NodeProcess::Follower(follower);
        let crash = *chance.pick(&[Crash::Process, Crash::Machine]);
        let what = match chance.below(11) {
            0 => Event::Hold(path, chance.millis(10..=5_000)),
            1 => Event::Reset(path),
            2 | 3 => Event::Trickle(path, chance.millis(10..=80)),
            4 => Event::SenderDies(sender, crash),
            5 => Event::Process(ProcessFault::Dies(process, crash)),
            6 => Event::Process(ProcessFault::Pauses(process, chance.millis(10..=SHORT_PAUSE_MS))),
            7 => {
                let time = chance.millis(LONG_PAUSE_MS..=2 * LONG_PAUSE_MS);
                Event::Process(ProcessFault::Pauses(process, time))
            }
            8 => Event::FlipBits(sender, chance.within(1..=6) as u32),
            9 => Event::DoubleFrame(sender),
            _ => Event::LateFrame(sender, chance.millis(10..=1_000)),
        };
        Self { at: chance.millis(0..=BEGIN_WITHIN_MS), what }
    }
}

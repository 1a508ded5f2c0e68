//! Hot path.
//! The stages that other processes compute. This process computes the last one.
//!
//! One thread sends steps to the first stage, as soon as the tokens that their rows continue are known. One thread for each
//! stage passes the stage's rows on: to the next stage, or to the ring from which this process's GPUs fetch them.

use std::io;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use device::cuda::{Bf16, CudaError, HostOutbox, PinnedNumbers};
use kernels::cuda::ComputeCard;
use kv_cache::FenceSignal;
use types::{TokenId, in_full};

use super::launched_step::LostFlags;
use super::links::{LinkSizes, TokenRing};
use super::plan::{InputToken, Plan};
use crate::backend::remote::{RemoteStage, StageInput, StageLost, StageRow};
use crate::error::{LoadError, OpenError};
use crate::step::{Row, RowInput};

/// The threads of the stages in other processes. They end when this value is dropped, or a stage is lost.
#[derive(Debug)]
pub(super) struct Elsewhere {
    /// It has room for all orders of the steps that may be in flight.
    orders: SyncSender<Order>,
    spare: Receiver<PinnedNumbers<u32>>,
    lost: LostFlags,
}

/// What this process needs for the stages in other processes.
#[derive(Debug)]
pub(super) struct ElsewhereParts<'a> {
    pub(super) remote: &'a [Arc<dyn RemoteStage>],
    pub(super) rows: HostOutbox<Bf16>,
    pub(super) sizes: LinkSizes,
    pub(super) vocab: usize,
    pub(super) lost: LostFlags,
    pub(super) card: &'a ComputeCard,
}

#[derive(Debug)]
enum Order {
    Step {
        rows: Vec<RowElsewhere>,
        place: usize,
        signal: Arc<FenceSignal>,
    },
    /// The tokens that a step samples, which later rows may continue.
    Tokens {
        place: usize,
        tokens: PinnedNumbers<u32>,
    },
}

/// A row of a step.
#[derive(Debug)]
struct RowElsewhere {
    row: StageRow,
    /// The index in the ring of the token that the row continues; `None` if the row has its tokens.
    drawn: Option<u32>,
}

/// A step that was sent to a stage.
#[derive(Debug)]
struct SentStep {
    rows: Arc<[StageRow]>,
    place: usize,
    signal: Arc<FenceSignal>,
}

/// Sends steps to the first stage.
struct Sender {
    first: Arc<dyn RemoteStage>,
    /// The tokens of the steps in flight, by their places in the ring.
    tokens: Vec<Option<PinnedNumbers<u32>>>,
    spare: SyncSender<PinnedNumbers<u32>>,
    ring: TokenRing,
    vocab: usize,
}

/// Passes the rows of one stage on.
struct Passer {
    stage: Arc<dyn RemoteStage>,
    next: Next,
    hidden: usize,
}

/// Where the rows of a stage go to.
enum Next {
    Stage(Arc<dyn RemoteStage>, SyncSender<SentStep>),
    Here(Arc<Mutex<HostOutbox<Bf16>>>),
}

// === impl Elsewhere ===

impl Elsewhere {
    pub(super) fn start(parts: ElsewhereParts<'_>) -> Result<Self, OpenError> {
        let ElsewhereParts { remote, rows, sizes, vocab, lost, card } = parts;
        let ring = TokenRing::new(sizes.n_stages, sizes.limits.rows);
        let n_places = ring.n_places();
        let (orders, to_send) = sync_channel(2 * n_places);
        // The sender keeps the tokens of all places, and as many may be on the way to it.
        let (give_back, spare) = sync_channel(2 * n_places);
        for _ in 0..2 * n_places {
            let tokens = card.pinned(sizes.limits.rows)?;
            give_back.try_send(tokens).expect("the channel has room for all of them");
        }
        let rows = Arc::new(Mutex::new(rows));
        let first = Arc::clone(remote.first().expect("a process has other stages"));
        let tokens = (0..n_places).map(|_| None).collect();
        let sender = Sender { first, tokens, spare: give_back, ring, vocab };
        let channels = remote.iter().map(|_| sync_channel(n_places));
        let (senders, receivers): (Vec<_>, Vec<_>) = channels.unzip();
        for (nth, (stage, sent)) in remote.iter().zip(receivers).enumerate() {
            let next = match remote.get(nth + 1) {
                Some(next) => Next::Stage(Arc::clone(next), senders[nth + 1].clone()),
                None => Next::Here(Arc::clone(&rows)),
            };
            let passer = Passer { stage: Arc::clone(stage), next, hidden: sizes.hidden };
            spawn("stage-rows", &lost, &rows, move || passer.pass_all(&sent))?;
        }
        let sent = senders.into_iter().next().expect("there is a first stage");
        spawn("stage-steps", &lost, &rows, move || sender.send_all(&to_send, &sent))?;
        Ok(Self { orders, spare, lost })
    }

    /// Sends a step to the first stage. `signal` is raised for the layers of other processes.
    pub(super) fn begin(
        &self,
        plan: &Plan<'_>,
        rows: &[Row<'_>],
        place: usize,
        signal: &Arc<FenceSignal>,
    ) -> Result<(), CudaError> {
        let rows = plan.passing(rows).map(|(row, input)| RowElsewhere::of(row, input)).collect();
        self.order(Order::Step { rows, place, signal: Arc::clone(signal) })
    }

    /// Returns memory for the tokens of a step.
    pub(super) fn tokens(&self) -> Result<PinnedNumbers<u32>, CudaError> {
        self.spare.try_recv().map_err(|_| self.error())
    }

    /// Sends the tokens that a step samples, which are being copied.
    pub(super) fn sampled(&self, place: usize, tokens: PinnedNumbers<u32>) -> Result<(), CudaError> {
        self.order(Order::Tokens { place, tokens })
    }

    fn order(&self, order: Order) -> Result<(), CudaError> {
        self.orders.try_send(order).map_err(|_| self.error())
    }

    fn error(&self) -> CudaError {
        self.lost.elsewhere.get_or_init(StageLost::too_many_steps);
        self.lost.error()
    }
}

/// Starts a thread. If `work` fails, the stages are lost, and no GPU waits for their rows any more.
fn spawn(
    name: &str,
    lost: &LostFlags,
    rows: &Arc<Mutex<HostOutbox<Bf16>>>,
    work: impl FnOnce() -> Result<(), StageLost> + Send + 'static,
) -> Result<(), LoadError> {
    let (lost, rows) = (lost.clone(), Arc::clone(rows));
    let run = move || {
        if let Err(error) = work() {
            lost.elsewhere.get_or_init(|| error);
            lost.raise();
            rows.lock().unwrap_or_else(PoisonError::into_inner).release();
        }
    };
    let started: io::Result<thread::JoinHandle<()>> = thread::Builder::new().name(name.to_owned()).spawn(run);
    started.map(drop).map_err(LoadError::Threads)
}

// === impl Sender ===

impl Sender {
    /// Sends steps until no more come.
    fn send_all(mut self, orders: &Receiver<Order>, sent: &SyncSender<SentStep>) -> Result<(), StageLost> {
        while let Ok(order) = orders.recv() {
            match order {
                Order::Tokens { place, tokens } => {
                    if let Some(old) = self.tokens[place].replace(tokens) {
                        // There is room for all, so only a dropped backend refuses it.
                        let _ = self.spare.try_send(old);
                    }
                }
                Order::Step { rows, place, signal } => {
                    let rows = rows.into_iter().map(|row| self.known(row)).collect::<Result<Vec<_>, _>>()?;
                    if sent.send(SentStep { rows: rows.clone().into(), place, signal }).is_err() {
                        return Ok(());
                    }
                    self.first.begin(StageInput { rows, ..StageInput::default() })?;
                }
            }
        }
        Ok(())
    }

    /// Returns the row with its tokens. Waits until the step that samples its token has ended.
    fn known(&mut self, row: RowElsewhere) -> Result<StageRow, StageLost> {
        let RowElsewhere { mut row, drawn } = row;
        if let Some(index) = drawn {
            let (place, nth) = self.ring.split(index);
            let tokens =
                self.tokens[place].as_mut().expect("the step's tokens come before rows that continue them");
            let tokens = tokens.numbers().map_err(|error| StageLost(in_full(&error)))?;
            // A row that has failed has no token. Its next row fails too, so any token does.
            let token = tokens[nth];
            row.tokens = vec![TokenId(if (token as usize) < self.vocab { token } else { 0 })];
        }
        Ok(row)
    }
}

impl RowElsewhere {
    fn of(row: &Row<'_>, input: Option<InputToken>) -> Self {
        let (tokens, drawn) = match (input, row.input) {
            (Some(InputToken::Drawn(index)), _) => (Vec::new(), Some(index)),
            (Some(InputToken::Token(token)), _) => (vec![TokenId(token)], None),
            (None, RowInput::Tokens(tokens)) => (tokens.to_vec(), None),
            (None, RowInput::Previous) => (Vec::new(), None),
        };
        let tables = row.tables.iter().map(|table| table.to_vec()).collect();
        Self { row: StageRow { tokens, start: row.start, tables, outcome: Ok(()) }, drawn }
    }
}

// === impl Passer ===

impl Passer {
    /// Passes rows on until no more steps were sent.
    fn pass_all(self, sent: &Receiver<SentStep>) -> Result<(), StageLost> {
        while let Ok(step) = sent.recv() {
            let results = self.stage.finish(&mut |n_layers| step.signal.layers_done(n_layers))?;
            let n_tokens: usize = step.rows.iter().map(|row| row.tokens.len()).sum();
            if results.hidden.len() != hidden_bytes(n_tokens, self.hidden) {
                return Err(StageLost::other_step());
            }
            match &self.next {
                Next::Here(rows) => {
                    rows.lock().unwrap_or_else(PoisonError::into_inner).put(step.place, &results.hidden);
                }
                Next::Stage(next, sent) => {
                    let rows = step.rows.to_vec();
                    if sent.send(step).is_err() {
                        return Ok(());
                    }
                    next.begin(StageInput { rows, hidden: results.hidden, ..StageInput::default() })?;
                }
            }
        }
        Ok(())
    }
}

/// Returns the bytes of the rows that stages pass on: the residual, and the rows normed for the next layer.
pub(super) fn hidden_bytes(n_tokens: usize, hidden: usize) -> usize {
    2 * n_tokens * hidden * size_of::<Bf16>()
}

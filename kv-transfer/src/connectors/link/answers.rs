//! Where a receiver's answers to a sender go.

use std::sync::Arc;

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::frame::{Body, Frame};
use crate::processes::{LandingEvent, LandingReport, OtherProcesses, ReportLandings};

/// Where the answers to the sender go.
#[derive(Debug)]
pub(super) enum Answers {
    /// To the sender, on stream 0.
    Sender {
        answers: SenderAnswers,
        /// The other processes of this node; `None` if it has one.
        processes: Option<Arc<dyn OtherProcesses>>,
    },
    /// To the head of this node, which has stream 0.
    Head(Arc<dyn ReportLandings>),
}

/// The queue of answers on stream 0. Cheap to clone.
#[derive(Clone, Debug)]
pub(super) struct SenderAnswers {
    pub(super) queue: mpsc::Sender<Frame>,
    /// The end of the link. A sender that does not read its answers loses it.
    pub(super) gone: CancellationToken,
}

impl Answers {
    pub(super) fn say(&self, frame: Frame) {
        match self {
            Self::Sender { answers, .. } => answers.say(frame),
            Self::Head(reports) => {
                // On this wire the only other answer is the end of a landing, which has a report of its own.
                if let Frame { transfer, lane, body: Body::Refetch { spans }, .. } = frame {
                    reports.report(LandingReport { transfer, event: LandingEvent::Refetch { lane, spans } });
                }
            }
        }
    }
}

impl SenderAnswers {
    pub(super) fn say(&self, frame: Frame) {
        if self.queue.try_send(frame).is_err() {
            self.gone.cancel();
        }
    }
}

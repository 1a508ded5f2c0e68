//! A head's share in a landing that the other processes of its node fill too.

use std::sync::Arc;

use chassis::guards::{Guard, stands};
use futures::{StreamExt, stream};
use tracing::debug;

use super::answers::SenderAnswers;
use super::frame::{Body, Frame};
use crate::error::TransferError;
use crate::landing::OpenLanding;
use crate::processes::{LandOrder, LandingEvent, OtherProcesses};

/// Orders the other processes to receive their parts of the landing, and handles their reports until none of
/// them writes any more.
///
/// The sender may send when all processes have accepted the landing.
pub(super) async fn serve(
    link: u64,
    answers: SenderAnswers,
    landing: Arc<OpenLanding>,
    processes: Arc<dyn OtherProcesses>,
) {
    let Some(((), writes)) = landing.begin_copy(|_| ()) else { return };
    // Until this is dropped, the blocks of the landing are not reused.
    let _writes = stands(Guard::AllQuiet).then_some(writes);
    let (transfer, n_processes) = (landing.landing().transfer, processes.n_processes());
    let order = order(link, &landing);
    let reports = (0..n_processes).map(|process| {
        let reports = processes.land(process, order.clone());
        let reports = stream::unfold(reports, async |mut reports| Some((reports.recv().await?, reports)));
        reports.map(Some).chain(stream::iter([None])).map(move |event| (process, event)).boxed()
    });
    let mut reports = stream::select_all(reports);
    let mut accepted = vec![false; n_processes];
    let mut has_ended = false;
    loop {
        let report = tokio::select! {
            biased;
            () = landing.changed_since(OpenLanding::is_over), if !has_ended => {
                has_ended = true;
                (0..n_processes).for_each(|process| processes.end_landing(process, link, transfer));
                continue;
            }
            report = reports.next() => report,
        };
        let Some((process, event)) = report else { return };
        match event {
            Some(LandingEvent::Accepted) => {
                accepted[process] = true;
                if accepted.iter().all(|accepted| *accepted) || !stands(Guard::AllAccepted) {
                    answers.say(Frame::new(transfer, Body::Accepted));
                }
            }
            Some(LandingEvent::Refetch { lane, spans }) => {
                answers.say(Frame::new(transfer, Body::Refetch { spans }).on(lane));
            }
            Some(LandingEvent::Landed(landed)) => landing.landed_elsewhere(process, &landed),
            Some(LandingEvent::Failed(error)) => landing.fail(error),
            Some(LandingEvent::Quiet) => {
                debug!(%transfer, process, "process writes no more KV of the landing")
            }
            None if landing.is_over() || landing.has_landed(process) => {}
            None => {
                let why = "a process of this node is lost";
                landing.fail(TransferError::SeveralProcesses(why.to_owned()));
            }
        }
    }
}

fn order(link: u64, landing: &OpenLanding) -> LandOrder {
    let of_node = landing.landing();
    LandOrder {
        transfer: of_node.transfer,
        link,
        from_tp: landing.lanes().from_tp(),
        n_tokens: of_node.n_tokens,
        held_tokens: of_node.held_tokens,
        tables: of_node.tables.clone(),
    }
}

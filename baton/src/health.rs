//! `baton health`: whether a process is ready, as an exit code. Images without a shell have nothing else to ask with.

use std::process::ExitCode;
use std::time::Duration;

use http_body_util::{BodyExt as _, Empty};
use hyper::Uri;
use hyper::body::Bytes;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;

use crate::cli::HealthArgs;
use crate::exit::Failed;

/// A process that takes longer to say that it is ready is not.
const ANSWER_WITHIN: Duration = Duration::from_secs(3);

/// Ends with 0 if the page answers with success, with 1 otherwise, and says why.
pub(crate) fn run(args: &HealthArgs) -> Result<ExitCode, Failed> {
    let url: Uri = args.url.parse().map_err(Failed::usage)?;
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Failed::start)?;
    runtime.block_on(async {
        let answer = tokio::time::timeout(ANSWER_WITHIN, ask(url)).await;
        answer.map_err(|_| Failed::work(format!("{}: no answer within {ANSWER_WITHIN:?}", args.url)))?
    })
}

async fn ask(url: Uri) -> Result<ExitCode, Failed> {
    let client: Client<_, Empty<Bytes>> = Client::builder(TokioExecutor::new()).build_http();
    let response = client.get(url).await.map_err(Failed::work)?;
    let status = response.status();
    let body = response.into_body().collect().await.map_err(Failed::work)?.to_bytes();
    if status.is_success() {
        return Ok(ExitCode::SUCCESS);
    }
    Err(Failed::work(format!("{status}: {}", String::from_utf8_lossy(&body).trim())))
}

//! `baton health`: reports by the exit code whether a process is ready, for images without a shell.

use std::process::ExitCode;
use std::time::Duration;

use http_body_util::{BodyExt as _, Empty};
use hyper::Uri;
use hyper::body::Bytes;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;

use crate::cli::HealthArgs;
use crate::exit::CommandError;
use crate::http_url;

/// The longest wait for an answer. A process that takes longer counts as not ready.
pub(crate) const ANSWER_WITHIN: Duration = Duration::from_secs(3);

/// Exits with 0 if the page answers with success. Otherwise exits with 1 and prints the reason.
pub(crate) fn run(args: &HealthArgs) -> Result<ExitCode, CommandError> {
    let url = page(&args.url)?;
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(CommandError::start)?;
    runtime.block_on(async {
        let answer = tokio::time::timeout(ANSWER_WITHIN, ask(url)).await;
        answer.map_err(|_| CommandError::work(format!("{}: no answer within {ANSWER_WITHIN:?}", args.url)))?
    })
}

/// Returns the address of the page to request, with `/ready` if the address has no path.
fn page(text: &str) -> Result<Uri, CommandError> {
    let url: Uri = http_url::parse(text)?.parse().map_err(CommandError::usage)?;
    if url.path() != "/" {
        return Ok(url);
    }
    format!("{}/ready", http_url::parse(text)?).parse().map_err(CommandError::usage)
}

async fn ask(url: Uri) -> Result<ExitCode, CommandError> {
    let client: Client<_, Empty<Bytes>> = Client::builder(TokioExecutor::new()).build_http();
    let response = client
        .get(url.clone())
        .await
        .map_err(|error| CommandError::work(format!("{url}: {}", http_url::failure(&error))))?;
    http_url::refuse_grpc(&response).map_err(|reason| CommandError::work(format!("{url}: {reason}")))?;
    let status = response.status();
    let body = response.into_body().collect().await.map_err(CommandError::work)?.to_bytes();
    if status.is_success() {
        return Ok(ExitCode::SUCCESS);
    }
    Err(CommandError::work(format!("{url}: {status}: {}", String::from_utf8_lossy(&body).trim())))
}

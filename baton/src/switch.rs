//! `baton sleep`, `baton wake` and `baton admin role`: send a request to a node's admin port, and print the result.

use std::process::ExitCode;

use http_body_util::{BodyExt as _, Empty};
use hyper::body::Bytes;
use hyper::{Method, Request, StatusCode, Uri};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use serde_json::Value;
use tokio::time::timeout;

use crate::cli::{RoleArgs, SwitchArgs, WakeArgs};
use crate::exit::CommandError;
use crate::health::ANSWER_WITHIN;
use crate::{http_url, interrupt, output};

pub(crate) fn sleep(args: &SwitchArgs) -> Result<ExitCode, CommandError> {
    run("sleep", args)
}

pub(crate) fn wake(args: &WakeArgs) -> Result<ExitCode, CommandError> {
    match &args.role {
        Some(role) => run(&format!("wake?role={role}"), &args.switch),
        None => run("wake", &args.switch),
    }
}

pub(crate) fn role(args: &RoleArgs) -> Result<ExitCode, CommandError> {
    let RoleArgs { switch, role, force } = args;
    run(&format!("role?role={role}&force={force}"), switch)
}

/// Posts to the page `what` of the node and prints its answer. There is no deadline, because a drain or
/// loading a model may take long.
fn run(what: &str, args: &SwitchArgs) -> Result<ExitCode, CommandError> {
    interrupt::says("interrupted: the node continues the operation")?;
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(CommandError::start)?;
    runtime.block_on(async {
        let node = admin_of(args).await?;
        let url: Uri = format!("{node}/{what}").parse().map_err(CommandError::usage)?;
        let answer = ask(Method::POST, url, args)
            .await
            .map_err(|error| CommandError::work(format!("{node}: {}", http_url::failure(&*error))))?;
        let told = told(what, &node, &answer).map_err(CommandError::work)?;
        output::print(&format!("{told}\n"))?;
        Ok(ExitCode::SUCCESS)
    })
}

/// Returns the address of the node's admin port. The router is asked if the node is given by name.
async fn admin_of(args: &SwitchArgs) -> Result<String, CommandError> {
    if args.node.contains(':') {
        return http_url::parse(&args.node);
    }
    let router = http_url::parse(&args.router)?;
    let url: Uri = format!("{router}/debug/cluster").parse().map_err(CommandError::usage)?;
    let answer = timeout(ANSWER_WITHIN, ask(Method::GET, url, args))
        .await
        .map_err(|_| CommandError::work(format!("{router}: no answer within {ANSWER_WITHIN:?}")))?
        .map_err(|error| CommandError::work(format!("{router}: {}", http_url::failure(&*error))))?;
    if let Some(refused) = answer.body["error"]["message"].as_str() {
        return Err(CommandError::work(format!("{router}: {refused}")));
    }
    let nodes = answer.body["nodes"].as_array().cloned().unwrap_or_default();
    let found = nodes.iter().find(|node| node["id"] == args.node.as_str());
    found.and_then(|node| node["admin"].as_str()).map(|admin| format!("http://{admin}")).ok_or_else(|| {
        let node = &args.node;
        CommandError::work(format!(
            "{router} knows no node {node:?}; for a sleeping node, use its admin port"
        ))
    })
}

struct NodeAnswer {
    status: StatusCode,
    body: Value,
}

async fn ask(
    method: Method,
    url: Uri,
    args: &SwitchArgs,
) -> Result<NodeAnswer, Box<dyn std::error::Error + Send + Sync>> {
    let client: Client<_, Empty<Bytes>> = Client::builder(TokioExecutor::new()).build_http();
    let mut request = Request::builder().method(method).uri(url);
    if let Some(file) = &args.key_file {
        let key = std::fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
        request = request.header("authorization", format!("Bearer {}", key.trim()));
    }
    let request = request.body(Empty::new())?;
    let response = client.request(request).await?;
    http_url::refuse_grpc(&response)?;
    let status = response.status();
    let bytes = response.into_body().collect().await?.to_bytes();
    let body = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
    Ok(NodeAnswer { status, body })
}

/// Returns the node's answer as a sentence; an error if the node refused.
fn told(what: &str, node: &str, answer: &NodeAnswer) -> Result<String, String> {
    let NodeAnswer { status, body } = answer;
    if !status.is_success() {
        let error = &body["error"];
        return Err(match (error["code"].as_str(), error["message"].as_str()) {
            (Some(code), Some(message)) => format!("{node}: {message} ({code})"),
            _ => format!("{node}: {status}: is this the admin port of a node that computes?"),
        });
    }
    let seconds = body["seconds"].as_f64().unwrap_or_default();
    let used = match (body["used_bytes_before"].as_u64(), body["used_bytes_after"].as_u64()) {
        (Some(before), Some(after)) => format!(": {} MiB in use, {} MiB before", after >> 20, before >> 20),
        _ => String::new(),
    };
    let unknown = match body["announced"].as_bool() {
        Some(false) => "; the registry does not answer: routers get the change when it does",
        _ => "",
    };
    Ok(match what {
        "sleep" => format!("asleep after {seconds:.1} s{used}; baton wake {node}"),
        _ if what.starts_with("role?") => format!("role changed after {seconds:.1} s{unknown}"),
        _ => format!("awake after {seconds:.1} s{used}{unknown}"),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[tokio::test]
    async fn a_router_that_does_not_answer_is_not_waited_for() {
        let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let router = format!("http://{}", silent.local_addr().expect("it is bound"));
        let args = SwitchArgs { node: "decode-0".to_owned(), router: router.clone(), key_file: None };
        let error = admin_of(&args).await.expect_err("nothing answers");
        assert!(format!("{error:?}").contains(&format!("{router}: no answer within 3s")), "{error:?}");
    }

    #[test]
    fn an_answer_is_a_sentence() {
        let node = "http://127.0.0.1:9";
        for (what, status, body, sentence) in [
            (
                "sleep",
                200,
                json!({ "seconds": 1.25, "used_bytes_before": 9 << 20, "used_bytes_after": 1 << 20 }),
                Ok("asleep after 1.2 s: 1 MiB in use, 9 MiB before; baton wake http://127.0.0.1:9"),
            ),
            ("wake", 200, json!({ "seconds": 3.0, "announced": true }), Ok("awake after 3.0 s")),
            (
                "role?role=both&force=true",
                200,
                json!({ "seconds": 0.3, "announced": false }),
                Ok(
                    "role changed after 0.3 s; the registry does not answer: routers get the change when it does",
                ),
            ),
            ("role?role=both&force=false", 200, json!({ "seconds": 0.3 }), Ok("role changed after 0.3 s")),
            (
                "wake",
                409,
                json!({ "error": { "code": "awake_already", "message": "the node is awake already" } }),
                Err("http://127.0.0.1:9: the node is awake already (awake_already)"),
            ),
            (
                "wake",
                404,
                Value::Null,
                Err("http://127.0.0.1:9: 404 Not Found: is this the admin port of a node that computes?"),
            ),
        ] {
            let answer = NodeAnswer { status: StatusCode::from_u16(status).expect("a status"), body };
            let told = told(what, node, &answer);
            assert_eq!(told.as_deref().map_err(String::as_str), sentence);
        }
    }
}

//! Checks whether the registry answers, and lists its members.

use std::time::Duration;

use chassis::{Gate, World};
use registry::{RegistryError, RegistryParts, RegistryProblem};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use types::{MissingWire, NodeInfo, Role, in_full};

use crate::config_file::ConfigFile;

use super::finding::Finding;

const GROUP: &str = "registry";
/// The longest wait for the registry's answer. A slower registry is also too slow when a process starts.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

pub(super) async fn look(process: &ConfigFile, world: &World) -> Vec<Finding> {
    let Some(url) = process.registry_url() else {
        return vec![Finding::ok(GROUP, "embedded: this router is the registry")];
    };
    let shown = registry::url::RegistryUrl::parse(url).map_or_else(|_| url.to_owned(), |url| url.to_string());
    match tokio::time::timeout(ANSWER_WITHIN, members(url, world)).await {
        Ok(Ok(members)) => {
            let answers = Finding::ok(GROUP, format!("{shown}: answers; {}", who(&members)));
            std::iter::once(answers).chain(members.iter().flat_map(goes_without)).collect()
        }
        Ok(Err(_)) if !process.tls().is_set() && expects_tls(url).await => {
            let found = format!("{shown}: the router expects TLS, and this process speaks plaintext");
            vec![Finding::bad(GROUP, found, "set the files of [tls]")]
        }
        Ok(Err(error)) => vec![refused(&shown, process, &error)],
        Err(_) => {
            let found = format!("{shown}: unreachable: no answer within {ANSWER_WITHIN:?}");
            vec![Finding::bad(GROUP, found, advice(url, RegistryProblem::Unreachable))]
        }
    }
}

async fn members(url: &str, world: &World) -> Result<Vec<NodeInfo>, RegistryError> {
    registry::ask_once(url, RegistryParts { world: world.clone(), gate: Gate::new("doctor") }).await
}

fn refused(shown: &str, process: &ConfigFile, error: &RegistryError) -> Finding {
    let url = process.registry_url().unwrap_or_default();
    let trouble = match error.trouble() {
        // Without certificates the embedded registry has none either.
        RegistryProblem::Certificate if !url.starts_with("etcd") && !process.tls().is_set() => {
            RegistryProblem::Unreachable
        }
        trouble => trouble,
    };
    let what = match trouble {
        RegistryProblem::Address => "not a usable address",
        RegistryProblem::Password => "the user or the password is refused",
        RegistryProblem::Permission => "the user may not read and write this cluster's keys",
        RegistryProblem::Secret => "the router refuses this process's secret or clock",
        RegistryProblem::Certificate => {
            "no TLS connection: a certificate is refused, or one side does not speak TLS"
        }
        RegistryProblem::Unreachable => "unreachable",
    };
    Finding::bad(GROUP, format!("{shown}: {what}: {}", in_full(error)), advice(url, trouble))
}

/// Whether an embedded registry answers plaintext with a TLS alert.
async fn expects_tls(url: &str) -> bool {
    const ALERT: u8 = 21;
    let Some(addr) = url.strip_prefix("embedded://") else { return false };
    let asked = async {
        let mut stream = TcpStream::connect(addr).await.ok()?;
        stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.ok()?;
        stream.read_u8().await.ok()
    };
    matches!(tokio::time::timeout(ANSWER_WITHIN, asked).await, Ok(Some(ALERT)))
}

fn who(members: &[NodeInfo]) -> String {
    let count = |is: fn(Role) -> bool| members.iter().filter(|node| is(node.role)).count();
    let pool = match count(Role::pools) {
        0 => "no pool".to_owned(),
        n => format!("{n} pool nodes"),
    };
    let (prefill, decode) = (count(Role::prefills), count(Role::decodes));
    format!("it has {prefill} prefill and {decode} decode nodes and {pool}")
}

/// Returns a finding for each connector that a member announces as not available.
fn goes_without(node: &NodeInfo) -> Vec<Finding> {
    let note = |missing: &MissingWire| {
        let found = format!("{} has no {}: {}", node.id, missing.scheme, missing.why);
        Finding::note(
            GROUP,
            found,
            "nothing to do if it has other connectors: /debug/cluster of the router lists them",
        )
    };
    node.without.iter().map(note).collect()
}

fn advice(url: &str, trouble: RegistryProblem) -> String {
    let is_etcd = url.starts_with("etcd");
    match trouble {
        RegistryProblem::Address => "correct registry.url, or create the file that it names".to_owned(),
        RegistryProblem::Password => {
            "correct the user and the password in registry.url, or in the file that its password_file names"
                .to_owned()
        }
        RegistryProblem::Permission => {
            "have etcd's administrator grant the user `readwrite` with --prefix on /baton/CLUSTER/".to_owned()
        }
        RegistryProblem::Secret => {
            "give this process the same cluster.secret_file as the router, and synchronize the clocks".to_owned()
        }
        RegistryProblem::Certificate if !is_etcd => {
            "give both processes certificates of one CA for one cluster, each for its role, and set [tls] on both"
                .to_owned()
        }
        RegistryProblem::Certificate => {
            "set ca= to the CA of etcd's certificate, cert= and key= to the client certificate that etcd requires, server_name= to the name in etcd's certificate; without ca= there is no TLS"
                .to_owned()
        }
        RegistryProblem::Unreachable => {
            let who = if is_etcd {
                "etcd runs (`etcdctl endpoint health`), that it expects TLS only if registry.url has ca="
            } else {
                "the router runs, that this is its gRPC port"
            };
            format!("check that {who}, that registry.url names it, and that no firewall or NetworkPolicy blocks it")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_trouble_has_an_advice_of_its_own() {
        let all = [
            RegistryProblem::Address,
            RegistryProblem::Password,
            RegistryProblem::Permission,
            RegistryProblem::Secret,
            RegistryProblem::Certificate,
            RegistryProblem::Unreachable,
        ];
        let advices: std::collections::BTreeSet<String> =
            all.into_iter().map(|trouble| advice("etcd://e", trouble)).collect();
        assert_eq!(advices.len(), all.len());
    }

    #[tokio::test]
    async fn a_registry_that_nobody_is_at_is_found_out() {
        let free = std::net::TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("bound");
        let url = format!("embedded://{free}");
        let answer = tokio::time::timeout(Duration::from_millis(300), members(&url, &World::real())).await;
        assert!(!matches!(answer, Ok(Ok(_))), "{answer:?}");
    }
}

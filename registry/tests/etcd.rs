//! Tests of the etcd registry against a real etcd.

#![allow(missing_debug_implementations)]

mod support;

use std::sync::Arc;
use std::time::Duration;

use baton_registry as registry;
use chassis::{Gate, World};
use registry::conformance::{RegistryUnderTest, Watcher, announced, in_time, left, node};
use registry::etcd::EtcdClient;
use registry::etcd::client::prefix_end;
use registry::etcd::client::v3;
use registry::{AnnouncementState, MembershipEvent, Registry, RegistryError, RegistryParts, RegistryProblem};
use types::{NodeId, NodeInfo};

use support::certificates::{Certificates, shown};
use support::etcd::Etcd;
use support::wire::Wire;

const PREFIX: &str = "/baton/blue/";

fn parts() -> RegistryParts {
    RegistryParts { world: World::real(), gate: Gate::new("test") }
}

/// Opens the registry `blue` at `endpoint`, with the shortest lease that works on a loaded machine.
fn blue(endpoint: &str) -> Arc<dyn Registry> {
    open(&format!("etcd://{endpoint}/blue?ttl_s=3"))
}

fn open(url: &str) -> Arc<dyn Registry> {
    registry::open(url, parts()).expect("a good address")
}

async fn subject() -> RegistryUnderTest {
    let etcd = Etcd::start().await;
    let endpoint = etcd.endpoint();
    RegistryUnderTest { one: blue(&endpoint), two: blue(&endpoint), keep: Box::new(etcd) }
}

registry::conformance!(
    #[tokio::test]
    subject
);

/// Two announced nodes, and a watcher that has seen both.
struct Pair {
    nodes: [NodeInfo; 2],
    announcements: [registry::Announcement; 2],
    watcher: Watcher,
}

impl Pair {
    async fn of(registry: &dyn Registry) -> Self {
        let nodes = [node("a", 1), node("b", 1)];
        let announcements =
            [announced(registry, nodes[0].clone()).await, announced(registry, nodes[1].clone()).await];
        let mut watcher = Watcher::of(registry).await;
        watcher.sees(&nodes).await;
        Self { nodes, announcements, watcher }
    }

    /// Asserts that the watcher reports both nodes and nothing else during `trouble`. Afterwards a fresh
    /// watcher, which knows only what etcd returns, must see both.
    async fn survives(&mut self, registry: &dyn Registry, trouble: impl Future<Output = ()>) {
        let trouble = async {
            trouble.await;
            Watcher::of(registry).await.sees(&self.nodes).await;
        };
        let heard = self.watcher.hears_during(trouble).await;
        let both = MembershipEvent::Snapshot(self.nodes.to_vec());
        assert!(heard.iter().all(|event| *event == both), "{heard:?}");
    }

    /// Asserts that the watcher's next event is a snapshot of both nodes.
    async fn still_both(&mut self) {
        assert_eq!(self.watcher.next().await, MembershipEvent::Snapshot(self.nodes.to_vec()));
    }

    /// Asserts that the watcher still receives events: one node leaves, and the watcher reports it.
    async fn goes_on(mut self) {
        let [a, _b] = self.announcements;
        drop(a);
        self.watcher.sees(&self.nodes[1..]).await;
    }
}

// === etcd stops and returns ===

#[tokio::test]
async fn a_second_without_etcd_changes_nothing() {
    let mut etcd = Etcd::start().await;
    let registry = blue(&etcd.endpoint());
    let mut pair = Pair::of(&*registry).await;
    let trouble = async {
        etcd.stop().await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        etcd.restart().await;
    };
    pair.survives(&*registry, trouble).await;
    pair.goes_on().await;
}

#[tokio::test]
async fn a_frozen_etcd_changes_nothing() {
    let etcd = Etcd::start().await;
    let registry = blue(&etcd.endpoint());
    let mut pair = Pair::of(&*registry).await;
    let trouble = async {
        etcd.freeze();
        tokio::time::sleep(Duration::from_secs(1)).await;
        etcd.thaw();
    };
    pair.survives(&*registry, trouble).await;
    pair.goes_on().await;
}

#[tokio::test]
async fn an_etcd_that_was_frozen_for_longer_than_a_lease_is_doubted() {
    let etcd = Etcd::start().await;
    let registry = open(&format!("etcd://{}/blue?ttl_s=6", etcd.endpoint()));
    let mut pair = Pair::of(&*registry).await;
    let trouble = async {
        etcd.freeze();
        tokio::time::sleep(Duration::from_secs(8)).await;
        etcd.thaw();
    };
    pair.survives(&*registry, trouble).await;
    pair.goes_on().await;
}

#[tokio::test]
async fn while_etcd_is_away_nothing_is_said() {
    let mut etcd = Etcd::start().await;
    let registry = blue(&etcd.endpoint());
    let mut pair = Pair::of(&*registry).await;
    etcd.stop().await;
    let mut fresh = Watcher::of(&*registry).await;
    // The silence is longer than any lease, so leases expire within it.
    let silence = Duration::from_secs(4);
    tokio::time::timeout(silence, pair.watcher.next()).await.expect_err("the members stay known");
    tokio::time::timeout(silence, fresh.next())
        .await
        .expect_err("no members are known, which differs from an empty list");
    let mut standings = pair.announcements[0].standings();
    in_time(standings.wait_for(|standing| *standing == AnnouncementState::Trying)).await.expect("it is told");
    etcd.restart().await;
    fresh.sees(&pair.nodes).await;
    pair.still_both().await;
}

#[tokio::test]
async fn an_etcd_that_lost_everything_is_told_again() {
    let mut etcd = Etcd::start().await;
    let registry = blue(&etcd.endpoint());
    let mut pair = Pair::of(&*registry).await;
    let trouble = async {
        etcd.stop().await;
        etcd.restart_empty().await;
    };
    pair.survives(&*registry, trouble).await;
    pair.goes_on().await;
}

#[tokio::test]
async fn who_died_while_etcd_lost_everything_is_given_up() {
    let mut etcd = Etcd::start().await;
    let registry = blue(&etcd.endpoint());
    let Pair { nodes, announcements: [a, _b], mut watcher } = Pair::of(&*registry).await;
    a.abandon();
    etcd.stop().await;
    etcd.restart_empty().await;
    assert_eq!(watcher.next().await, MembershipEvent::Snapshot(nodes.to_vec()));
    assert_eq!(watcher.next().await, left("a", 1));
}

#[tokio::test]
async fn nodes_may_start_before_etcd() {
    let mut etcd = Etcd::start().await;
    let registry = blue(&etcd.endpoint());
    etcd.stop().await;
    let mut a = in_time(registry.announce(node("a", 1))).await.expect("away is no error");
    assert_eq!(a.standing(), AnnouncementState::Trying);
    etcd.restart().await;
    in_time(a.announced()).await;
}

#[tokio::test]
async fn one_endpoint_of_several_is_enough() {
    let etcd = Etcd::start().await;
    let gone = Wire::to(etcd.endpoint()).await.address().to_owned();
    let registry = blue(&format!("{gone},{}", etcd.endpoint()));
    let _a = announced(&*registry, node("a", 1)).await;
    Watcher::of(&*registry).await.sees(&[node("a", 1)]).await;
}

// === gaps ===

#[tokio::test]
async fn a_watch_that_missed_compacted_history_gets_a_snapshot() {
    let etcd = Etcd::start().await;
    let wire = Wire::to(etcd.endpoint()).await;
    let direct = blue(&etcd.endpoint());
    let Pair { nodes: [a_node, _], announcements: [_a, b], .. } = Pair::of(&*direct).await;
    // The gap is short compared to the lease, so it does not count as an outage.
    let mut watcher = Watcher::of(&*open(&format!("etcd://{}/blue?ttl_s=60", wire.address()))).await;
    watcher.sees(&[a_node.clone(), node("b", 1)]).await;

    wire.cut();
    in_time(b.withdraw()).await;
    let _c = announced(&*direct, node("c", 1)).await;
    compact(&etcd.client().await).await;
    wire.mend();

    let now = MembershipEvent::Snapshot(vec![a_node, node("c", 1)]);
    assert_eq!(watcher.next().await, now, "etcd kept its data, so who is missing has left");
    let _d = announced(&*direct, node("d", 1)).await;
    assert_eq!(watcher.next().await, MembershipEvent::Joined(node("d", 1)));
}

/// Compacts etcd's whole history, as operators do at intervals.
async fn compact(client: &EtcdClient) {
    let now = client.kv().range(range(PREFIX)).await.expect("etcd answers").into_inner();
    let revision = now.header.expect("it has one").revision;
    client.kv().compact(v3::CompactionRequest { revision }).await.expect("there is history");
}

/// Returns the request for all keys with this prefix.
fn range(prefix: &str) -> v3::RangeRequest {
    v3::RangeRequest { key: prefix.into(), range_end: prefix_end(prefix), keys_only: true }
}

#[tokio::test]
async fn a_node_that_is_cut_off_comes_back() {
    let etcd = Etcd::start().await;
    let wire = Wire::to(etcd.endpoint()).await;
    let mut watcher = Watcher::of(&*blue(&etcd.endpoint())).await;
    let mut a = announced(&*blue(wire.address()), node("a", 1)).await;
    watcher.sees(&[node("a", 1)]).await;
    wire.cut();
    assert_eq!(watcher.next().await, left("a", 1));
    wire.mend();
    assert_eq!(watcher.next().await, MembershipEvent::Joined(node("a", 1)));
    in_time(a.announced()).await;
}

// === other writers of the same keys ===

#[tokio::test]
async fn a_key_deleted_by_hand_comes_back() {
    let etcd = Etcd::start().await;
    let registry = blue(&etcd.endpoint());
    let mut pair = Pair::of(&*registry).await;
    let key = format!("{PREFIX}nodes/a").into_bytes();
    let delete = v3::DeleteRangeRequest { key, range_end: Vec::new() };
    etcd.client().await.kv().delete_range(delete).await.expect("etcd answers");
    assert_eq!(pair.watcher.next().await, left("a", 1));
    assert_eq!(pair.watcher.next().await, MembershipEvent::Joined(node("a", 1)));
}

#[tokio::test]
async fn what_cannot_be_read_is_left_out() {
    let etcd = Etcd::start().await;
    let registry = blue(&etcd.endpoint());
    let client = etcd.client().await;
    let put_rubbish = async |key: &str| {
        let key = format!("{PREFIX}{key}").into_bytes();
        let put = v3::PutRequest { key, value: b"rubbish".to_vec(), lease: 0 };
        client.kv().put(put).await.expect("etcd answers");
    };
    for key in ["nodes/rubbish", "nodes/", "nodes/a/b", "something-else"] {
        put_rubbish(key).await;
    }
    let mut watcher = Watcher::of(&*registry).await;
    assert_eq!(watcher.next().await, MembershipEvent::Snapshot(vec![]));
    put_rubbish("nodes/more").await;
    let _a = announced(&*registry, node("rubbish", 1)).await;
    assert_eq!(watcher.next().await, MembershipEvent::Joined(node("rubbish", 1)));
}

#[tokio::test]
async fn clusters_do_not_see_each_other() {
    let etcd = Etcd::start().await;
    let (blue, blues) = (blue(&etcd.endpoint()), open(&format!("etcd://{}/blues?ttl_s=3", etcd.endpoint())));
    let _a = announced(&*blues, node("a", 1)).await;
    let _b = announced(&*blue, node("b", 1)).await;
    Watcher::of(&*blue).await.sees(&[node("b", 1)]).await;
    Watcher::of(&*blues).await.sees(&[node("a", 1)]).await;
}

#[tokio::test]
async fn nothing_but_the_mark_stays_behind() {
    let etcd = Etcd::start().await;
    let registry = blue(&etcd.endpoint());
    let Pair { announcements: [a, b], .. } = Pair::of(&*registry).await;
    in_time(a.withdraw()).await;
    in_time(b.withdraw()).await;
    let client = etcd.client().await;
    let all = client.kv().range(range("/")).await.expect("etcd answers").into_inner();
    let keys: Vec<&[u8]> = all.kvs.iter().map(|entry| &*entry.key).collect();
    assert_eq!(keys, [b"/baton/blue/life"]);
    let leases = client.lease().lease_leases(v3::LeaseLeasesRequest {}).await.expect("etcd answers");
    assert_eq!(leases.into_inner().leases.len(), 0);
}

// === users and permissions ===

const USER: (&str, &str) = ("baton", "p@ss word");

/// Turns on authentication in etcd, with one user whose role covers the keys of one cluster.
async fn protect(etcd: &Etcd) {
    let mut auth = etcd.client().await.auth();
    let (key, range_end) = (PREFIX.into(), prefix_end(PREFIX));
    let perm = v3::Permission { perm_type: v3::permission::Type::Readwrite.into(), key, range_end };
    for (name, password, role) in [(USER.0, USER.1, "baton"), ("root", "root", "root")] {
        auth.role_add(v3::AuthRoleAddRequest { name: role.into() }).await.expect("etcd answers");
        let user = v3::AuthUserAddRequest { name: name.into(), password: password.into() };
        auth.user_add(user).await.expect("etcd answers");
        let grant = v3::AuthUserGrantRoleRequest { user: name.into(), role: role.into() };
        auth.user_grant_role(grant).await.expect("both are there");
    }
    let keys = v3::AuthRoleGrantPermissionRequest { name: "baton".into(), perm: Some(perm) };
    auth.role_grant_permission(keys).await.expect("the role is there");
    auth.auth_enable(v3::AuthEnableRequest {}).await.expect("there is a root");
}

#[tokio::test]
async fn a_user_who_may_use_the_prefix_is_enough() {
    let etcd = Etcd::start_with(vec!["--auth-token-ttl=1".to_owned()], None).await;
    protect(&etcd).await;
    let registry = open(&format!("etcd://baton:p%40ss%20word@{}/blue?ttl_s=3", etcd.endpoint()));
    let mut pair = Pair::of(&*registry).await;
    // The wait is longer than a token's lifetime: the announcements continue, and the watch notices when one
    // ends.
    tokio::time::timeout(Duration::from_secs(4), pair.watcher.next()).await.expect_err("nothing happens");
    pair.goes_on().await;
}

#[tokio::test]
async fn who_may_not_is_told_so_at_once() {
    let etcd = Etcd::start().await;
    protect(&etcd).await;
    let endpoint = etcd.endpoint();
    for (url, cause) in [
        (format!("etcd://baton:wrong@{endpoint}/blue"), "invalid user ID or password"),
        (format!("etcd://unknown:wrong@{endpoint}/blue"), "invalid user ID or password"),
        (format!("etcd://{endpoint}/blue"), "user name is empty"),
        (format!("etcd://baton:p%40ss%20word@{endpoint}/green"), "permission denied"),
    ] {
        let refused = in_time(open(&url).announce(node("a", 1))).await.expect_err(&url);
        let RegistryError::Denied { source, .. } = refused else { panic!("{url}: {refused}") };
        assert!(source.to_string().contains(cause), "{url}: {source}");
    }
}

#[tokio::test]
async fn tls_with_certificates_on_both_sides() {
    let certificates = Certificates::new();
    let etcd = Etcd::start_with(certificates.etcd_arguments(), Some(certificates.client_files())).await;
    let address = format!("etcd://{}/blue", etcd.endpoint());
    let registry = open(&format!("{address}?{}&ttl_s=3", certificates.query()));
    Pair::of(&*registry).await.goes_on().await;

    let strangers = Certificates::new();
    for (who, query) in [
        ("a client without a certificate", format!("ca={}", shown(&certificates.path("ca.pem")))),
        ("a client that does not trust this etcd", strangers.query()),
    ] {
        let announcement = in_time(open(&format!("{address}?{query}")).announce(node("c", 1))).await;
        let standing = announcement.expect("it may be mended on etcd's side").standing();
        assert_eq!(standing, AnnouncementState::Trying, "{who}");
    }
    let in_plain_text = in_time(open(&address).announce(node("c", 1))).await;
    assert_eq!(in_plain_text.expect("it may be mended on etcd's side").standing(), AnnouncementState::Trying);
}

/// Provokes each kind of trouble that `baton doctor` distinguishes, with one address for each.
#[tokio::test]
async fn what_is_wrong_is_told_apart() {
    let trouble = async |url: String| {
        let refused = in_time(registry::ask_once(&url, parts())).await;
        let error = refused.expect_err(&url);
        (error.trouble(), format!("{url}: {error:?}"))
    };
    let etcd = Etcd::start().await;
    protect(&etcd).await;
    let endpoint = etcd.endpoint();
    let known = format!("etcd://baton:p%40ss%20word@{endpoint}/blue");
    assert_eq!(in_time(registry::ask_once(&known, parts())).await.expect("it may"), []);
    let gone = Wire::to(endpoint.clone()).await.address().to_owned();
    let certificates = Certificates::new();
    let of_tls = Etcd::start_with(certificates.etcd_arguments(), Some(certificates.client_files())).await;
    let with_tls = format!("etcd://{}/blue", of_tls.endpoint());
    let strangers = Certificates::new();
    let only_ca = format!("ca={}", shown(&certificates.path("ca.pem")));
    for (url, expected) in [
        (format!("etcd://baton:wrong@{endpoint}/blue"), RegistryProblem::Password),
        (format!("etcd://{endpoint}/blue"), RegistryProblem::Password),
        (format!("etcd://baton:p%40ss%20word@{endpoint}/green"), RegistryProblem::Permission),
        (format!("etcd://{gone}/blue"), RegistryProblem::Unreachable),
        (format!("{with_tls}?{only_ca}"), RegistryProblem::Certificate),
        (format!("{with_tls}?{}", strangers.query()), RegistryProblem::Certificate),
        (format!("etcd://{endpoint}/blue?{only_ca}"), RegistryProblem::Certificate),
        ("etcd://a:b:c/blue".to_owned(), RegistryProblem::Address),
        (format!("{with_tls}?ca=/no/such/file"), RegistryProblem::Address),
    ] {
        let (found, told) = trouble(url).await;
        assert_eq!(found, expected, "{told}");
    }
}

// === load on etcd ===

/// etcd closes a connection after the third ping that comes within five seconds of the one before.
#[tokio::test]
async fn a_watch_without_changes_stays_open() {
    let etcd = Etcd::start().await;
    let registry = open(&format!("etcd://{}/blue", etcd.endpoint()));
    let mut watcher = Watcher::of(&*registry).await;
    watcher.sees(&[]).await;
    tokio::time::timeout(Duration::from_secs(11), watcher.next()).await.expect_err("nothing happens");
    let _a = announced(&*registry, node("a", 1)).await;
    assert_eq!(
        watcher.next().await,
        MembershipEvent::Joined(node("a", 1)),
        "no snapshot: it is the same watch"
    );
}

#[tokio::test]
async fn signs_of_life_are_few() {
    let etcd = Etcd::start().await;
    let registry = open(&format!("etcd://{}/blue?ttl_s=4", etcd.endpoint()));
    let mut pair = Pair::of(&*registry).await;
    let before = requests(&etcd).await;
    let span = Duration::from_secs(4);
    tokio::time::timeout(span, pair.watcher.next()).await.expect_err("nothing happens");
    let n_requests = requests(&etcd).await - before;
    // The limits allow for four renewals per lease and node, up to twice as often because of jitter, and one
    // read with each.
    assert!((4..=2 * 8 + 2).contains(&n_requests), "{n_requests} requests of two nodes in one lease's time");
    assert_eq!(pair.watcher.members.get(&NodeId::new("a")), Some(&pair.nodes[0]));
}

/// Returns the number of reads, writes and grants that etcd has answered, from its metrics page.
async fn requests(etcd: &Etcd) -> u64 {
    let page = in_time(metrics(&etcd.endpoint())).await.expect("etcd answers");
    let counts = page.lines().filter(|line| line.starts_with("grpc_server_handled_total"));
    let ours = counts.filter(|line| {
        ["\"Range\"", "\"Txn\"", "\"Put\"", "\"LeaseGrant\""].iter().any(|call| line.contains(call))
    });
    ours.map(|line| line.rsplit(' ').next().expect("a number ends it").parse::<u64>().expect("a count")).sum()
}

async fn metrics(endpoint: &str) -> std::io::Result<String> {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let mut stream = tokio::net::TcpStream::connect(endpoint).await?;
    let request = format!("GET /metrics HTTP/1.0\r\nHost: {endpoint}\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut page = String::new();
    stream.read_to_string(&mut page).await?;
    Ok(page)
}

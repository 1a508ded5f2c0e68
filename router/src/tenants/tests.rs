use std::io::Write as _;

use chassis::metrics::Metrics;

use super::*;

struct Setup {
    tenants: Tenants,
    file: tempfile::NamedTempFile,
    metrics: Metrics,
}

fn table(keys: &[(&str, &str)]) -> String {
    let mut text =
        "[tenants.acme]\nrequests_max = 2\npriority_max = 3\n[tenants.zenith]\n[keys]\n".to_owned();
    for (key, tenant) in keys {
        text += &format!("\"{}\" = \"{tenant}\"\n", key::hash(key));
    }
    text
}

fn setup() -> Setup {
    let mut file = tempfile::NamedTempFile::new().expect("a file");
    file.write_all(table(&[("a", "acme"), ("z", "zenith")]).as_bytes()).expect("written");
    let loaded = TenantTable::load(file.path(), None).expect("a table");
    let metrics = Metrics::new("router");
    let of_router = RouterMetrics::new(&metrics);
    let file_with_table = TenantsFile { path: file.path().to_owned(), table: loaded };
    let sources = KeySources { file: Some(file_with_table), oidc: None };
    let tenants = Tenants::with_keys(sources, World::seeded(1), of_router);
    Setup { tenants, file, metrics }
}

fn with_key(authorization: &str) -> Claims<'_> {
    Claims { authorization: Some(authorization), ..Claims::default() }
}

#[tokio::test(start_paused = true)]
async fn the_key_says_the_tenant_and_headers_do_not() {
    let Setup { tenants, .. } = setup();
    let claims = Claims { tenant: Some("zenith"), priority: Some(100), ..with_key("Bearer a") };
    let client = tenants.client(&claims).expect("known");
    assert_eq!((client.tenant.as_str(), client.priority), ("acme", Priority(3)));
    let low = tenants.client(&Claims { priority: Some(-3), ..claims }).expect("known");
    assert_eq!(low.priority, Priority(-3), "a client may give way");
    assert_eq!(tenants.client(&with_key("bearer  z ")).expect("known").tenant.as_str(), "zenith");
}

#[tokio::test(start_paused = true)]
async fn without_a_known_key_there_is_no_client() {
    let Setup { tenants, metrics, .. } = setup();
    for authorization in ["", "a", "Basic a", "Bearer ", "Bearer b", "Bearer a a"] {
        let refused = tenants.client(&with_key(authorization)).expect_err("refused");
        assert!(matches!(refused, AcceptError::Unauthorized { .. }), "{authorization:?}: {refused}");
    }
    tenants.client(&Claims::default()).expect_err("no header at all");
    let page = metrics.page();
    assert!(page.contains("baton_router_unauthorized_total{reason=\"missing\"} 5"), "{page}");
    assert!(page.contains("baton_router_unauthorized_total{reason=\"unknown\"} 2"), "{page}");
}

#[test]
fn without_keys_only_trusted_proxies_are_believed() {
    let proxies = TrustedProxies::parse(&["10.0.0.0/8".to_owned()]).expect("a network");
    let tenants = Tenants::without_keys(proxies);
    let claims = Claims { tenant: Some("acme"), priority: Some(9), ..Claims::default() };
    let from = |peer: &str| tenants.client(&Claims { peer: Some(peer.parse().unwrap()), ..claims });
    let client = from("10.9.8.7").expect("a proxy");
    assert_eq!((client.tenant.as_str(), client.priority), ("acme", Priority(9)));
    assert_eq!(from("192.0.2.1").expect_err("refused").param(), "x-baton-tenant");
    let priority = Claims { tenant: None, ..claims };
    assert_eq!(tenants.client(&priority).expect_err("refused").param(), "x-baton-priority");
    let plain = tenants.client(&Claims { priority: Some(0), ..Claims::default() }).expect("nothing claimed");
    assert_eq!(plain.tenant, TenantId::default());
}

#[tokio::test(start_paused = true)]
async fn limits_refuse_and_are_counted() {
    let Setup { tenants, metrics, .. } = setup();
    let client = tenants.client(&with_key("Bearer a")).expect("known");
    let permit = tenants.admit(&client, 2, 10).expect("room").expect("it has limits");
    let refused = tenants.admit(&client, 1, 10).expect_err("two are under way");
    tenants.refused(&client, &refused);
    drop(permit);
    tenants.admit(&client, 1, 10).expect("room again");
    let never = tenants.admit(&client, 3, 10).expect_err("three never run together");
    assert_eq!(never.to_string(), "n: 3 answers are more than the tenant's 2 concurrent requests");
    let page = metrics.page();
    let line = "baton_router_tenant_refusals_total{limit=\"requests\",tenant=\"acme\"} 1";
    assert!(page.contains(line), "{page}");
}

/// Waits until the task that follows the file has read it again.
async fn read_again(setup: &Setup, text: &str) {
    std::fs::write(setup.file.path(), text).expect("written");
    // The clock is advanced and other threads get time, because the file is read on a blocking thread that
    // the paused clock does not wait for.
    let began = setup.metrics.page();
    for _ in 0..200 {
        tokio::time::sleep(reload::READ_EVERY / 4).await;
        tokio::task::spawn_blocking(std::thread::yield_now).await.expect("it ran");
        if setup.metrics.page() != began {
            return;
        }
    }
    panic!("the file was not read again");
}

#[tokio::test(start_paused = true)]
async fn a_changed_file_is_in_force_and_a_wrong_one_is_not() {
    let setup = setup();
    let following = tokio::task::LocalSet::new();
    let (follow, tenants) = (setup.tenants.clone().follow_files(), &setup.tenants);
    following.spawn_local(follow);
    let steps = async {
        let known = |key: &str| tenants.client(&with_key(&format!("Bearer {key}"))).is_ok();
        read_again(&setup, &table(&[("b", "acme")])).await;
        assert!(known("b") && !known("a") && !known("z"));
        read_again(&setup, "[keys]\nbroken").await;
        assert!(known("b"), "the table before it holds");
        read_again(&setup, &table(&[("c", "zenith")])).await;
        assert!(known("c") && !known("b"));
        let page = setup.metrics.page();
        for (outcome, count) in [("loaded", 2), ("refused", 1)] {
            let line = format!("baton_router_tenants_file_reloads_total{{outcome=\"{outcome}\"}} {count}");
            assert!(page.contains(&line), "{page}");
        }
    };
    following.run_until(steps).await;
}

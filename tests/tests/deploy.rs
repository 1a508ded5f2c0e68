//! Checks that the files in `deploy/` fit the Kubernetes API and the executable.
//! `tests/python/deploy/check.py` checks the files, and this test the pages that they name.

use std::path::Path;
use std::process::Command;

use baton_tests::{Client, Up, eventually, executable, python};

/// Runs one of the checks, with the Helm and schemas that `./test.sh` installs.
fn check(name: &str) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ lies in the workspace");
    let output = Command::new(python())
        .arg(root.join("tests/python/deploy/check.py"))
        .arg(name)
        .env("TEST_EXECUTABLE", executable::baton())
        .output()
        .expect("./test.sh installs what this needs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn every_object_is_what_the_kubernetes_api_takes() {
    check("schemas");
}

#[test]
fn the_schemas_refuse_what_does_not_exist() {
    check("schemas_refuse");
}

#[test]
fn the_overlays_are_made_from_the_chart() {
    check("same");
}

#[test]
fn the_chart_refuses_values_that_it_does_not_know() {
    check("values");
}

#[test]
fn the_chart_refuses_names_of_releases_that_kubernetes_does_not_take() {
    check("release_names");
}

#[test]
fn a_text_like_a_number_stays_a_text() {
    check("texts_like_numbers");
}

#[test]
fn operators_add_to_the_pods_of_every_workload() {
    check("pods");
}

#[test]
fn every_process_gets_a_certificate_of_its_role_from_cert_manager() {
    check("certificates");
}

#[test]
fn operators_add_the_labels_by_which_their_prometheus_selects() {
    check("monitors");
}

#[test]
fn each_pool_of_nodes_is_scaled_by_its_own_numbers() {
    check("autoscaling");
}

#[test]
fn the_node_with_the_least_work_is_deleted_first() {
    check("deletion_cost");
}

#[test]
fn every_component_is_made_from_the_chart() {
    check("components");
}

#[test]
fn gpu_overlays_serve_the_model_that_the_operator_names() {
    check("models");
}

#[test]
fn a_drain_follows_the_deadline_and_the_grace_follows_the_drain() {
    check("deadlines");
}

#[test]
fn an_etcd_outside_is_named_by_a_secret_and_can_be_reached() {
    check("external_etcd");
}

#[test]
fn every_process_of_a_node_finds_its_head() {
    check("groups");
}

#[test]
fn rdma_needs_no_right_that_a_pod_cannot_have() {
    check("rdma");
}

#[test]
fn routers_before_pools_of_kubernetes_may_read_their_endpoints() {
    check("upstream");
}

#[test]
fn the_image_is_stripped_and_its_line_tables_lie_apart() {
    check("stripped");
}

#[test]
fn every_mounted_configuration_is_accepted() {
    check("configs");
}

#[test]
fn every_container_starts_with_the_variables_of_kubernetes_services() {
    check("service_links");
}

#[test]
fn every_port_probe_and_selector_names_what_exists() {
    check("names");
}

#[test]
fn network_policies_let_processes_reach_each_other() {
    check("reachable");
}

#[test]
fn the_chart_refuses_clusters_that_cannot_serve() {
    check("refusals");
}

#[test]
fn compose_names_what_exists() {
    check("compose");
}

#[test]
fn the_image_names_what_exists() {
    check("dockerfile");
}

#[test]
fn images_of_others_are_named_by_digest() {
    check("digests");
}

#[test]
fn the_image_has_a_list_of_all_its_crates() {
    check("sbom");
}

#[test]
fn every_metric_in_deploy_is_documented() {
    check("metrics");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_pages_that_probes_name_are_served() {
    let up = Up::start(&[]).await;
    let cluster = up.client().get_json("/debug/cluster").await;
    let admins =
        || {
            cluster["nodes"].as_array().expect("nodes").iter().map(|node| {
                Client::new(node["admin"].as_str().expect("an address").parse().expect("an address"))
            })
        };
    for client in std::iter::once(up.client()).chain(admins()) {
        for page in ["/live", "/ready", "/metrics"] {
            let (status, body) = client.get(page).await;
            assert_eq!(status.as_u16(), 200, "{client:?} {page}: {body}");
        }
    }
    for client in admins() {
        eventually("/rollout", async || (client.get("/rollout").await.0.as_u16() == 200).then_some(())).await;
    }
    let ready = format!("http://{}/ready", up.http);
    let health =
        |url: &str| Command::new(executable::baton()).args(["health", url]).status().expect("it runs");
    assert!(health(&ready).success());
    assert!(!health("http://127.0.0.1:1/ready").success());
}

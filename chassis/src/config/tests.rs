use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::*;
use crate::byte_size::ByteSize;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
struct Raw {
    name: String,
    http: Http,
    labels: BTreeMap<String, String>,
    tls: Option<Tls>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Tls {
    key: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
struct Http {
    port: u16,
    host: Option<String>,
    memory: ByteSize,
    tags: Vec<String>,
}

impl Default for Raw {
    fn default() -> Self {
        Self { name: "n".to_owned(), http: Http::default(), labels: BTreeMap::new(), tls: None }
    }
}

impl Default for Http {
    fn default() -> Self {
        Self { port: 8000, host: None, memory: ByteSize(1 << 30), tags: vec![] }
    }
}

fn read(text: &str, env: &[(&str, &str)]) -> Result<Raw, ConfigError> {
    let env = env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    parse(text, Origin::File(PathBuf::from("router.toml")), env)
}

#[track_caller]
fn check(text: &str, env: &[(&str, &str)], change: impl FnOnce(&mut Raw)) {
    let mut expected = Raw::default();
    change(&mut expected);
    assert_eq!(read(text, env).expect("accepted"), expected);
}

#[track_caller]
fn check_refused(text: &str, env: &[(&str, &str)], expected: &str) {
    assert_eq!(read(text, env).expect_err("refused").to_string(), expected);
}

#[test]
fn defaults_then_file_then_environment() {
    check("", &[], |_| {});
    check("[http]\nport = 1", &[], |raw| raw.http.port = 1);
    check("[http]\nport = 1", &[("BATON_HTTP__PORT", "2")], |raw| raw.http.port = 2);
    check("", &[("HOME", "/"), ("BATON_LOG", "debug"), ("BATON_CONFIG", "x")], |_| {});
}

#[test]
fn variables_have_types() {
    check("", &[("BATON_NAME", "42")], |raw| raw.name = "42".to_owned());
    check("", &[("BATON_NAME", "true")], |raw| raw.name = "true".to_owned());
    check("", &[("BATON_HTTP__HOST", "localhost")], |raw| raw.http.host = Some("localhost".to_owned()));
    check("", &[("BATON_HTTP__HOST", "\"1\"")], |raw| raw.http.host = Some("1".to_owned()));
    check("", &[("BATON_HTTP__MEMORY", "4GiB")], |raw| raw.http.memory = ByteSize(4 << 30));
    check("", &[("BATON_HTTP__TAGS", r#"["a", "b"]"#)], |raw| raw.http.tags = vec!["a".into(), "b".into()]);
    check("", &[("BATON_LABELS__ZONE", "z1")], |raw| {
        raw.labels.insert("zone".to_owned(), "z1".to_owned());
    });
    check("", &[("BATON_HTTP__HOST", "a\nother = 1")], |raw| {
        raw.http.host = Some("a\nother = 1".to_owned());
    });
}

#[test]
fn byte_sizes_may_be_numbers() {
    check("[http]\nmemory = 65536", &[], |raw| raw.http.memory = ByteSize(65536));
}

#[test]
fn maps_take_any_key() {
    check("[labels]\nanything = \"x\"", &[], |raw| {
        raw.labels.insert("anything".to_owned(), "x".to_owned());
    });
}

#[test]
fn unknown_keys_are_refused_with_the_nearest_name() {
    for (text, expected) in [
        ("[http]\nprot = 1", "router.toml: `http.prot`: no such setting, did you mean `http.port`?"),
        ("[http]\nhots = 'x'", "router.toml: `http.hots`: no such setting, did you mean `http.host`?"),
        ("port = 1", "router.toml: `port`: no such setting, did you mean `http.port`?"),
        ("[htp]\nport = 1", "router.toml: `htp`: no such setting, did you mean `http`?"),
        ("zzz = 1", "router.toml: `zzz`: no such setting"),
    ] {
        check_refused(text, &[], expected);
    }
}

#[test]
fn the_old_name_of_a_renamed_setting_is_refused_with_the_new_one() {
    let known = ["transfer.spin", "transfer.spin_us", "awake_ms"].map(str::to_owned);
    assert_eq!(new_name("transfer.awake_us", &known).as_deref(), Some("transfer.spin_us"));
    assert_eq!(new_name("other.awake_us", &known), None);
    let known = ["expert.transfer.spin_us", "expert.transfer.streams"].map(str::to_owned);
    assert_eq!(new_name("transfer.awake_us", &known).as_deref(), Some("expert.transfer.spin_us"));
    assert_eq!(new_name("transfer.streams", &known).as_deref(), Some("expert.transfer.streams"));
    assert_eq!(new_name("streams", &known), None);
}

#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
struct WithExpert {
    expert: Sections,
}

#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
struct Sections {
    http: Http,
}

#[test]
fn a_setting_that_moved_to_expert_is_refused_with_its_new_name() {
    let read = |text: &str, env: &[(&str, &str)]| {
        let env = env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        parse::<WithExpert>(text, Origin::File(PathBuf::from("node.toml")), env)
    };
    let refused = |text, env: &[(&str, &str)]| read(text, env).expect_err("refused").to_string();
    let moved = "`http.port`: no such setting, it is called `expert.http.port` now";
    assert_eq!(refused("[http]\nport = 1", &[]), format!("node.toml: {moved}"));
    let variable = ("BATON_HTTP__PORT", "1");
    assert_eq!(refused("", &[variable]), format!("environment variable BATON_HTTP__PORT: {moved}"));
    let raw = read("", &[("BATON_EXPERT__HTTP__PORT", "1")]).expect("accepted");
    assert_eq!(raw.expert.http.port, 1);
    assert!(has_setting::<WithExpert>("BATON_EXPERT__HTTP__PORT"));
    assert!(
        !has_setting::<WithExpert>("BATON_HTTP__PORT") && !has_setting::<WithExpert>("BATON_EXPERT__HTTP")
    );
}

#[test]
fn optional_sections_have_plain_names() {
    check("[tls]\nkey = 'k'", &[], |raw| raw.tls = Some(Tls { key: "k".to_owned() }));
    check_refused("[tls]\nkey = 'k'\ncolour = 1", &[], "router.toml: `tls.colour`: no such setting");
    let expected =
        "environment variable BATON_TLS__KEY: `tls.key`: invalid type: integer `1`, expected a string";
    check_refused("", &[("BATON_TLS__KEY", "1")], expected);
}

#[test]
fn unknown_variables_are_refused() {
    let expected =
        "environment variable BATON_HTTP__PROT: `http.prot`: no such setting, did you mean `http.port`?";
    check_refused("", &[("BATON_HTTP__PROT", "1")], expected);
    let expected = "environment variable BATON_HTP__PORT: `htp`: no such setting, did you mean `http`?";
    check_refused("[http]\nport = 1", &[("BATON_HTP__PORT", "1")], expected);
    check_refused(
        "[htp]\nport = 1",
        &[("BATON_HTTP__PORT", "1")],
        "router.toml: `htp`: no such setting, did you mean `http`?",
    );
}

/// The variables that kubelet sets for a Service with one named port.
const SERVICE_LINKS: [(&str, &str); 8] = [
    ("BATON_ROUTER_SERVICE_HOST", "10.96.0.7"),
    ("BATON_ROUTER_SERVICE_PORT", "8000"),
    ("BATON_ROUTER_SERVICE_PORT_HTTP_API", "8000"),
    ("BATON_ROUTER_PORT", "tcp://10.96.0.7:8000"),
    ("BATON_ROUTER_PORT_8000_TCP", "tcp://10.96.0.7:8000"),
    ("BATON_ROUTER_PORT_8000_TCP_ADDR", "10.96.0.7"),
    ("BATON_ROUTER_PORT_8000_TCP_PORT", "8000"),
    ("BATON_ROUTER_PORT_8000_TCP_PROTO", "tcp"),
];

#[test]
fn variables_of_kubernetes_services_are_passed_over() {
    check("", &SERVICE_LINKS, |_| {});
    // Cases: other release names, a Service called `baton`, IPv6, and a Service whose name contains a
    // section's name.
    for (service, address) in [
        ("BATON", "10.96.0.7"),
        ("BATON_X", "fd00::7"),
        ("BATON_HTTP", "10.96.0.7"),
        ("BATON_A_B_PORT", "10.0.0.1"),
    ] {
        let link = |(name, value): &(&str, &str)| {
            (name.replace("BATON_ROUTER", service), value.replace("10.96.0.7", address))
        };
        let links: Vec<(String, String)> = SERVICE_LINKS.iter().map(link).collect();
        let mut links: Vec<(&str, &str)> = links.iter().map(|(name, value)| (&**name, &**value)).collect();
        links.push(("BATON_HTTP__PORT", "2"));
        check("", &links, |raw| raw.http.port = 2);
    }
}

#[test]
fn what_only_looks_like_a_service_is_refused() {
    for (name, value) in [
        ("BATON_ROUTER_PORTS", "tcp://10.96.0.7:8000"),
        ("BATON_ROUTER_PORT_8000_TCP_NAME", "http"),
        ("BATON_ROUTER_PORT_8000_QUIC", "quic://10.96.0.7:8000"),
        ("BATON_ROUTER_SERVICE_PORT_HTTP", "http"),
        ("BATON_OTHER_SERVICE_PORT", "8000"),
        ("BATON_OTHER_SERVICE_HOST", "10.0.0.1"),
        ("BATON_HTTP_PORT", "8000"),
    ] {
        let env: Vec<_> = SERVICE_LINKS.into_iter().chain([(name, value)]).collect();
        let refused = read("", &env).expect_err(name).to_string();
        assert!(refused.starts_with(&format!("environment variable {name}: ")), "{refused}");
    }
    let expected =
        "environment variable BATON_HTTP_PORT: `http_port`: no such setting, did you mean `http.port`?";
    check_refused("", &[("BATON_HTTP_PORT", "8000")], expected);
}

#[test]
fn variables_of_systemd_and_slurm_are_not_settings() {
    let env = [
        ("INVOCATION_ID", "0123456789abcdef"),
        ("JOURNAL_STREAM", "8:12345"),
        ("NOTIFY_SOCKET", "/run/systemd/notify"),
        ("LISTEN_FDS", "1"),
        ("SLURM_JOB_NAME", "baton"),
        ("SLURM_STEP_NODELIST", "baton[0-3]"),
        ("SBATCH_EXPORT", "BATON_HTTP__PORT"),
    ];
    check("", &env, |_| {});
}

#[test]
fn wrong_values_name_place_and_key() {
    for (text, env, expected) in [
        ("[http]\nport = 'x'", None, "router.toml: `http.port`: invalid type: string \"x\", expected u16"),
        (
            "[http]\nport = 1",
            Some(("BATON_HTTP__PORT", "70000")),
            "environment variable BATON_HTTP__PORT: `http.port`: invalid value: integer `70000`, expected u16",
        ),
        (
            "[http]\nmemory = '4GB'",
            None,
            "router.toml: `http.memory`: `4GB` is not a number of bytes: write 65536, 64KiB, 512MiB, 4GiB or 1TiB",
        ),
        (
            "http = 1",
            Some(("BATON_HTTP__PORT", "1")),
            "environment variable BATON_HTTP__PORT: `http.port`: `http` is not a section",
        ),
        (
            "",
            Some(("BATON_HTTP__TAGS", "[1]")),
            "environment variable BATON_HTTP__TAGS: `http.tags[0]`: invalid type: integer `1`, expected a string",
        ),
    ] {
        check_refused(text, env.as_slice(), expected);
    }
}

#[test]
fn bad_toml_says_where() {
    let error = read("[http\nport = 1", &[]).expect_err("a bracket is missing");
    assert_eq!(error.to_string(), "router.toml is not TOML");
    let source = std::error::Error::source(&error).expect("the parser's words").to_string();
    assert!(source.contains("line 1, column 6"), "{source}");
}

#[test]
fn files_are_read() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("node.toml");
    let missing = load::<Raw>(Some(&file), []).expect_err("no such file");
    assert_eq!(missing.to_string(), format!("read {}", file.display()));
    std::fs::write(&file, "name = 'd1'").expect("written");
    assert_eq!(load::<Raw>(Some(&file), []).expect("accepted").name, "d1");
    assert_eq!(load::<Raw>(None, []).expect("accepted"), Raw::default());
}

//! The test makes `docs/configuration.md` from the code: the settings with their doc comments, and the defaults.
//!
//! `UPDATE_DOCS=1 cargo test -p baton-tests --test configuration` writes the page.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use chassis::config::parse;
use chassis::error::Origin;
use serde_json::Value;

/// The files that declare settings, of all processes.
const SOURCES: &[&str] = &[
    "node/src/config.rs",
    "router/src/config.rs",
    "chassis/src/telemetry/mod.rs",
    "pool-node/src/config.rs",
    "chassis/src/connections.rs",
    "node/src/config/expert.rs",
    "chassis/src/identity/settings.rs",
    "router/src/upstream/settings.rs",
    "router/src/balance/settings.rs",
];

const HEAD: &str = "\
# Configuration

The test `the_page_is_what_the_code_says` makes this page from the code: change the doc comments there.

Every process has one TOML file, given with `--config FILE` or in `BATON_CONFIG`. An unknown setting is refused, with the nearest name.
`BATON_SECTION__KEY=value` in the environment overrides a setting (`BATON_EXPERT__TRANSFER__STREAMS=4` is `[expert.transfer] streams = 4`), and `BATON_LOG` the log level before any file is read.
Settings under `[expert]` seldom need a change. Durations are integers with their unit in the name, amounts of memory are integers or `\"512MiB\"`, `\"4GiB\"`.

`baton --check-config FILE…` checks files of any process, `baton prefill --config FILE --check` also the environment, and `baton doctor --config FILE` the machine.
";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ lies in the workspace").to_owned()
}

/// A field of a struct, with its doc comment.
struct Field {
    name: String,
    of_type: String,
    about: String,
}

type Structs = BTreeMap<String, Vec<Field>>;

/// Returns the public fields of every struct in a source file.
fn structs(source: &str) -> Structs {
    let mut found = Structs::new();
    let (mut inside, mut about) = (None::<String>, String::new());
    for line in source.lines().map(str::trim) {
        if let Some(rest) = line.strip_prefix("pub struct ") {
            inside = rest.split([' ', '(', ';']).next().filter(|_| line.ends_with('{')).map(str::to_owned);
            about.clear();
        } else if line == "}" {
            inside = None;
        } else if let Some(comment) = line.strip_prefix("///") {
            about.push_str(comment);
        } else if let (Some(name), Some((field, of_type))) = (&inside, as_field(line)) {
            let about = std::mem::take(&mut about).trim().to_owned();
            found.entry(name.clone()).or_default().push(Field { name: field, of_type, about });
        } else if !line.starts_with("#[") {
            about.clear();
        }
    }
    found
}

fn as_field(line: &str) -> Option<(String, String)> {
    let (name, of_type) = line.strip_prefix("pub ")?.strip_suffix(',')?.split_once(": ")?;
    Some((name.to_owned(), of_type.to_owned()))
}

/// The sections that are on the page already, each with the process that it belongs to.
type Written = BTreeMap<String, &'static str>;

/// Writes one process's sections: its raw configuration's fields, each a struct of settings. A section that
/// an earlier process has with the same settings and defaults is on the page once.
fn process(
    written: &mut Written,
    title: &'static str,
    raw: &str,
    structs: &Structs,
    defaults: &Value,
) -> String {
    let mut page = format!("\n## {title}\n");
    let mut same: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for section in sections(raw, structs) {
        let table = table(&section, structs, defaults);
        match written.get(&table) {
            Some(other) => same.entry(other).or_default().push(format!("`[{}]`", section.name)),
            None => page += &table,
        }
        written.entry(table).or_insert(title);
    }
    for (other, sections) in same {
        write!(page, "\nThe same as for {}: {}.\n", lower(other), sections.join(", "))
            .expect("a string takes all");
    }
    page
}

/// Returns a process's tables with their dotted names. A field whose struct has only structs in it, as
/// `expert`, holds tables.
fn sections(raw: &str, structs: &Structs) -> Vec<Field> {
    let field =
        |name: String, field: &Field| Field { name, of_type: field.of_type.clone(), about: String::new() };
    let inner = |section: &Field| {
        let fields = structs
            .get(&section.of_type)
            .unwrap_or_else(|| panic!("{} is declared nowhere", section.of_type));
        let holds_tables = fields.iter().all(|field| structs.contains_key(&field.of_type));
        let tables = fields.iter().map(|one| field(format!("{}.{}", section.name, one.name), one));
        if holds_tables { tables.collect() } else { vec![field(section.name.clone(), section)] }
    };
    structs[raw].iter().flat_map(inner).collect()
}

/// Returns the names of all settings of a process, in dotted form.
fn settings(raw: &str, structs: &Structs) -> Vec<String> {
    let names = |section: Field| {
        let fields = &structs[&section.of_type];
        fields.iter().map(|field| format!("{}.{}", section.name, field.name)).collect::<Vec<_>>()
    };
    sections(raw, structs).into_iter().flat_map(names).collect()
}

fn table(section: &Field, structs: &Structs, defaults: &Value) -> String {
    let mut table = format!("\n### `[{}]`\n\n| setting | default | |\n|---|---|---|\n", section.name);
    let fields =
        structs.get(&section.of_type).unwrap_or_else(|| panic!("{} is declared nowhere", section.of_type));
    let defaults = section.name.split('.').fold(defaults, |value, key| &value[key]);
    for field in fields {
        assert!(!field.about.is_empty(), "{}.{} has no doc comment", section.name, field.name);
        writeln!(table, "| `{}` | {} | {} |", field.name, shown(&defaults[&field.name]), field.about)
            .expect("a string takes all");
    }
    table
}

/// Returns a title in lower case, for the middle of a sentence: `a router`.
fn lower(title: &str) -> String {
    let title = title.split(':').next().unwrap_or(title);
    title[..1].to_lowercase() + &title[1..]
}

/// Returns the default in the form in which a user writes it.
fn shown(default: &Value) -> String {
    match default {
        Value::Null => "none".to_owned(),
        Value::String(text) if text.is_empty() => "empty".to_owned(),
        value => format!("`{value}`"),
    }
}

/// Returns the structs of every file that declares settings of this process. Later files replace structs of
/// the same name.
fn declared(sources: &[&str]) -> Structs {
    let read =
        |source: &&str| structs(&std::fs::read_to_string(root().join(source)).expect("the source is there"));
    sources.iter().flat_map(read).collect()
}

fn of_router() -> Structs {
    declared(&[SOURCES[1], SOURCES[2], SOURCES[4], SOURCES[6], SOURCES[7], SOURCES[8]])
}

fn of_node() -> Structs {
    declared(&[SOURCES[0], SOURCES[5], SOURCES[2], SOURCES[4], SOURCES[6]])
}

/// Returns the structs of a pool node. Settings that it shares with other nodes are declared in their files.
fn of_pool() -> Structs {
    declared(&[SOURCES[0], SOURCES[5], SOURCES[3], SOURCES[2], SOURCES[4], SOURCES[6]])
}

fn page() -> String {
    let router = serde_json::to_value(router::RawRouterConfig::default()).expect("defaults can be written");
    let node = serde_json::to_value(node::RawNodeConfig::default()).expect("defaults can be written");
    let pool = serde_json::to_value(pool_node::RawPoolConfig::default()).expect("defaults can be written");
    let mut page = HEAD.to_owned();
    let mut written = Written::new();
    page += &process(&mut written, "A router", "RawRouterConfig", &of_router(), &router);
    let title = "A node: prefill, decode, or both";
    page += &process(&mut written, title, "RawNodeConfig", &of_node(), &node);
    page += &process(&mut written, "A pool node", "RawPoolConfig", &of_pool(), &pool);
    page
}

#[test]
fn the_page_is_what_the_code_says() {
    let (file, page) = (root().join("docs/configuration.md"), page());
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&file, &page).expect("written");
    }
    let written = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(
        written == page,
        "docs/configuration.md is not what the code says: UPDATE_DOCS=1 cargo test -p baton-tests --test configuration"
    );
}

#[test]
fn few_settings_are_outside_expert() {
    for (raw, structs, at_most) in [
        ("RawRouterConfig", of_router(), 35),
        ("RawNodeConfig", of_node(), 25),
        ("RawPoolConfig", of_pool(), 25),
    ] {
        let settings = settings(raw, &structs);
        assert!(settings.iter().any(|name| name == "expert.log.spans"), "{raw}: {settings:?}");
        let plain: Vec<_> = settings.iter().filter(|name| !name.starts_with("expert.")).collect();
        assert!(plain.iter().any(|name| *name == "log.level"), "{raw}: {plain:?}");
        assert!(plain.len() <= at_most, "{raw} has {} settings outside [expert]: {plain:?}", plain.len());
    }
}

/// Checks that the page names exactly the settings that a process reads.
#[test]
fn every_setting_is_on_the_page() {
    fn leaves(name: &str, value: &Value, found: &mut BTreeSet<String>) {
        let Value::Object(entries) = value else {
            found.insert(name.trim_start_matches('.').to_owned());
            return;
        };
        entries.iter().for_each(|(key, value)| leaves(&format!("{name}.{key}"), value, found));
    }
    for (raw, structs, defaults) in [
        ("RawRouterConfig", of_router(), serde_json::to_value(router::RawRouterConfig::default())),
        ("RawNodeConfig", of_node(), serde_json::to_value(node::RawNodeConfig::default())),
        ("RawPoolConfig", of_pool(), serde_json::to_value(pool_node::RawPoolConfig::default())),
    ] {
        let mut read = BTreeSet::new();
        leaves("", &defaults.expect("defaults can be written"), &mut read);
        assert_eq!(settings(raw, &structs).into_iter().collect::<BTreeSet<_>>(), read, "{raw}");
    }
}

/// The settings that were outside of `[expert]` in an earlier version, by process.
const MOVED: [(&str, &[&str]); 3] = [
    (
        "router",
        &[
            "router.attempts_max",
            "router.new_nodes_wait_ms",
            "router.nodes_wait_ms",
            "router.stuck_ms",
            "connections.connections_max",
            "connections.per_address_max",
            "connections.first_byte_ms",
            "connections.head_ms",
            "connections.idle_ms",
            "connections.bodies_max",
            "log.spans",
        ],
    ),
    (
        "node",
        &[
            "node.stuck_ms",
            "model.gpu_arch",
            "model.threads",
            "model.load_format",
            "scheduler.step_tokens_max",
            "scheduler.sequences_max",
            "scheduler.waiting_max",
            "scheduler.queue_ms_max",
            "scheduler.growth_blocks",
            "scheduler.launch_late",
            "transfer.streams",
            "transfer.stall_ms",
            "transfer.frame_bytes",
            "transfer.gpu_multiprocessors",
            "transfer.spin_us",
            "transfer.rdma_listen",
            "transfer.rdma_device",
            "decode.local_tokens_max",
            "decode.landings_max",
            "connections.connections_max",
            "connections.per_address_max",
            "connections.first_byte_ms",
            "connections.head_ms",
            "connections.idle_ms",
            "connections.bodies_max",
            "log.spans",
        ],
    ),
    ("pool", &["transfer.streams", "transfer.rdma_listen", "connections.head_ms", "log.spans"]),
];

#[test]
fn the_old_name_of_every_moved_setting_is_refused_with_the_new_one() {
    for (process, old_names) in MOVED {
        for old in old_names {
            let (section, key) = old.split_once('.').expect("a section and a key");
            let variable = format!("BATON_{}__{}", section.to_uppercase(), key.to_uppercase());
            let expected = format!("`{old}`: no such setting, it is called `expert.{old}` now");
            let from_file = refused(process, &format!("[{section}]\n{key} = 1"), []);
            assert_eq!(from_file, format!("the defaults: {expected}"), "{process}");
            let from_variable = refused(process, "", [(variable.clone(), "1".to_owned())]);
            assert_eq!(from_variable, format!("environment variable {variable}: {expected}"), "{process}");
        }
    }
    let awake = refused("node", "[transfer]\nawake_us = 1", []);
    assert!(awake.ends_with("it is called `expert.transfer.spin_us` now"), "{awake}");
}

#[test]
fn a_number_of_slots_outside_of_its_bounds_is_refused_by_name() {
    for process in ["node", "pool"] {
        let from_file = refused(process, "[expert.transfer]\nhost_slots = 65", []);
        assert!(from_file.contains("expert.transfer.host_slots"), "{process}: {from_file}");
        assert!(from_file.contains("65 slots, 1 to 64 are allowed"), "{process}: {from_file}");
        let variable = "BATON_EXPERT__TRANSFER__HOST_SLOTS".to_owned();
        let from_variable = refused(process, "", [(variable.clone(), "0".to_owned())]);
        assert!(from_variable.contains(&variable), "{process}: {from_variable}");
        assert!(from_variable.contains("0 slots, 1 to 64 are allowed"), "{process}: {from_variable}");
    }
}

fn refused<const N: usize>(process: &str, text: &str, env: [(String, String); N]) -> String {
    let error = match process {
        "router" => parse::<router::RawRouterConfig>(text, Origin::Defaults, env).err(),
        "node" => parse::<node::RawNodeConfig>(text, Origin::Defaults, env).err(),
        _ => parse::<pool_node::RawPoolConfig>(text, Origin::Defaults, env).err(),
    };
    error.expect("an old name is refused").to_string()
}

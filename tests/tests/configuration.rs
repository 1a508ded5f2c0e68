//! `docs/configuration.md` is made from the code: the settings with their doc comments, and the defaults themselves.
//!
//! `UPDATE_DOCS=1 cargo test -p baton-tests --test configuration` writes the page again.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use serde_json::Value;

/// Where settings are declared.
const SOURCES: &[&str] = &[
    "node/src/config.rs",
    "router/src/config.rs",
    "chassis/src/telemetry/mod.rs",
    "pool-node/src/config.rs",
    "chassis/src/connections.rs",
];

const HEAD: &str = "\
# Configuration

Made from the code by the test `the_page_is_what_the_code_says`; change the doc comments there, not this page.

Every process has one TOML file, given with `--config FILE` or in `BATON_CONFIG`.
A setting that is left out has its default; a setting that does not exist is refused, with the nearest name.
`BATON_SECTION__KEY=value` in the environment overrides a setting, and `BATON_LOG` the log level before anything is read.
Durations are integers with their unit in the name, amounts of memory are integers or `\"512MiB\"`, `\"4GiB\"`.

`baton --check-config FILE…` says what is wrong with files of any process, `baton prefill --config FILE --check` also with what the environment overrides, and `baton doctor --config FILE` whether this machine can give what the file asks for.
";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ lies in the workspace").to_owned()
}

/// A field with its doc comment.
struct Field {
    name: String,
    of_type: String,
    about: String,
}

type Structs = BTreeMap<String, Vec<Field>>;

/// The public fields of every struct in a source file.
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

/// One process's sections: its raw configuration's fields, each a struct of settings.
fn process(page: &mut String, title: &str, raw: &str, structs: &Structs, defaults: &Value) {
    writeln!(page, "\n## {title}").expect("a string takes all");
    for section in &structs[raw] {
        writeln!(page, "\n### `[{}]`\n", section.name).expect("a string takes all");
        writeln!(page, "| setting | default | |\n|---|---|---|").expect("a string takes all");
        let fields = structs
            .get(&section.of_type)
            .unwrap_or_else(|| panic!("{} is declared nowhere", section.of_type));
        for field in fields {
            let default = &defaults[&section.name][&field.name];
            assert!(!field.about.is_empty(), "{}.{} has no doc comment", section.name, field.name);
            writeln!(page, "| `{}` | {} | {} |", field.name, shown(default), field.about)
                .expect("a string takes all");
        }
    }
}

/// As one would write it.
fn shown(default: &Value) -> String {
    match default {
        Value::Null => "none".to_owned(),
        Value::String(text) if text.is_empty() => "empty".to_owned(),
        value => format!("`{value}`"),
    }
}

fn page() -> String {
    let read = |source: &str| -> Structs {
        structs(&std::fs::read_to_string(root().join(source)).expect("the source is there"))
    };
    let with_log =
        |source: &str| -> Structs { [source, SOURCES[2], SOURCES[4]].into_iter().flat_map(read).collect() };
    let router = serde_json::to_value(router::RawRouterConfig::default()).expect("defaults can be written");
    let node = serde_json::to_value(node::RawNodeConfig::default()).expect("defaults can be written");
    let mut page = HEAD.to_owned();
    process(&mut page, "A router", "RawRouterConfig", &with_log("router/src/config.rs"), &router);
    process(
        &mut page,
        "A node: prefill, decode, or both",
        "RawNodeConfig",
        &with_log("node/src/config.rs"),
        &node,
    );
    // What it has in common with other nodes is declared there.
    let of_pool = read(SOURCES[0]).into_iter().chain(with_log(SOURCES[3])).collect();
    let pool = serde_json::to_value(pool_node::RawPoolConfig::default()).expect("defaults can be written");
    process(&mut page, "A pool node", "RawPoolConfig", &of_pool, &pool);
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
fn no_process_has_more_settings_than_anyone_can_know() {
    for (raw, source) in
        [("RawRouterConfig", SOURCES[1]), ("RawNodeConfig", SOURCES[0]), ("RawPoolConfig", SOURCES[3])]
    {
        let structs = structs(&std::fs::read_to_string(root().join(source)).expect("the source is there"));
        let n_settings: usize =
            structs[raw].iter().map(|section| structs.get(&section.of_type).map_or(0, Vec::len)).sum();
        assert!((5..=40).contains(&n_settings), "{raw} has {n_settings} settings");
    }
}

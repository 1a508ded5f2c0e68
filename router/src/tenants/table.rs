//! The tenants file: the hashes of keys, and each tenant's limits.
//!
//! ```toml
//! [tenants.acme]
//! requests_max = 16
//! tokens_per_minute = 200000
//! context_tokens_max = 32768
//! priority_max = 1
//!
//! [keys]
//! "2f0c…" = "acme"
//! ```

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;
use types::TenantId;

use super::key::{self, KeyHash};
use super::limits::{Account, TenantLimits};
use crate::accept::is_name;

/// The tenants file as written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawTable {
    #[serde(default)]
    tenants: BTreeMap<String, TenantLimits>,
    #[serde(default)]
    keys: BTreeMap<String, String>,
}

/// The checked contents of the tenants file.
#[derive(Debug)]
pub struct TenantTable {
    keys: HashMap<KeyHash, Arc<Account>>,
    tenants: HashMap<TenantId, Arc<Account>>,
    text_hash: blake3::Hash,
}

/// The reason why a tenants file cannot be used. It never contains a key or a hash.
#[derive(Debug)]
pub struct TableError {
    file: PathBuf,
    reason: String,
}

impl TenantTable {
    /// Reads the tenants file and blocks meanwhile. Tenants that are also in `previous` keep their usage.
    pub fn load(file: &Path, previous: Option<&Self>) -> Result<Self, TableError> {
        let failed = |reason| TableError::new(file, reason);
        let text = std::fs::read_to_string(file).map_err(|error: io::Error| failed(error.to_string()))?;
        Self::parse(&text, previous).map_err(failed)
    }

    pub(super) fn parse(text: &str, previous: Option<&Self>) -> Result<Self, String> {
        let raw: RawTable = toml::from_str(text).map_err(|error| syntax(text, &error))?;
        let account = |(name, limits): (String, TenantLimits)| {
            if !is_name(&name) {
                return Err(format!("the tenant {name:?}: a name has letters, digits, '-', '_', '.' or ':'"));
            }
            let tenant = TenantId::new(name);
            let used = previous.and_then(|previous| previous.tenants.get(&tenant));
            Ok((tenant.clone(), Arc::new(Account::new(tenant, limits, used.map(|used| &**used)))))
        };
        let tenants: HashMap<TenantId, Arc<Account>> =
            raw.tenants.into_iter().map(account).collect::<Result<_, _>>()?;
        let key = |(nth, (hash, tenant)): (usize, (String, String))| {
            let nth = nth + 1;
            let hash = KeyHash::from_hex(&hash).map_err(|_| {
                format!(
                    "the key {nth} of the tenant {tenant:?} is not the hash of one: 64 hexadecimal digits"
                )
            })?;
            let account = tenants.get(&TenantId::new(tenant.as_str()));
            let account =
                account.ok_or_else(|| format!("key {nth}: there is no section [tenants.{tenant}]"))?;
            Ok((hash, Arc::clone(account)))
        };
        let keys = raw.keys.into_iter().enumerate().map(key).collect::<Result<_, String>>()?;
        Ok(Self { keys, tenants, text_hash: blake3::hash(text.as_bytes()) })
    }

    /// Returns the account of the client with this key.
    pub fn find(&self, key: &str) -> Option<Arc<Account>> {
        self.keys.get(&key::hash(key)).cloned()
    }

    /// Returns the account of a tenant that has a section.
    pub(super) fn account(&self, tenant: &TenantId) -> Option<Arc<Account>> {
        self.tenants.get(tenant).cloned()
    }

    pub fn n_keys(&self) -> usize {
        self.keys.len()
    }

    pub fn n_tenants(&self) -> usize {
        self.tenants.len()
    }

    pub(super) fn text_hash(&self) -> blake3::Hash {
        self.text_hash
    }
}

/// A table without keys.
impl Default for TenantTable {
    fn default() -> Self {
        Self { keys: HashMap::new(), tenants: HashMap::new(), text_hash: blake3::hash(b"") }
    }
}

impl TableError {
    pub(crate) fn new(file: &Path, reason: String) -> Self {
        Self { file: file.to_owned(), reason }
    }
}

impl fmt::Display for TableError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.file.display(), self.reason)
    }
}

impl std::error::Error for TableError {}

/// Returns the line and the reason of a syntax error. A key in place of its hash is left out, because errors
/// are logged.
fn syntax(text: &str, error: &toml::de::Error) -> String {
    let line = error.span().map_or(1, |span| text[..span.start].matches('\n').count() + 1);
    match error.message() {
        message if message.contains(key::PREFIX) => format!("line {line}: a key in place of its hash"),
        message => format!("line {line}: {message}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str) -> String {
        TenantTable::parse(text, None).expect_err("refused")
    }

    #[test]
    fn a_key_leads_to_its_tenant() {
        let hash = key::hash("secret");
        let text = format!("[tenants.acme]\npriority_max = 3\n[keys]\n\"{hash}\" = \"acme\"\n");
        let table = TenantTable::parse(&text, None).expect("a table");
        let account = table.find("secret").expect("known");
        assert_eq!((account.tenant().as_str(), account.limits().priority_max), ("acme", 3));
        assert!(table.find("Secret").is_none() && table.find("").is_none());
    }

    #[test]
    fn what_is_wrong_is_said_without_the_key() {
        let hash = key::hash("secret");
        for (text, reason) in [
            ("[tenants]\nacme = 3", "line 2: invalid type: integer `3`, expected struct TenantLimits"),
            ("[tenants.a]\nrequests = 3", "line 2: unknown field `requests`"),
            ("[tenants.a]\nrequests_max = 0", "line 2: invalid value: integer `0`, expected a nonzero u32"),
            ("[tenants.\"a b\"]", "the tenant \"a b\": a name has letters"),
            ("baton-123 = \"a\"", "line 1: a key in place of its hash"),
            ("[tenant.a]", "line 1: unknown field `tenant`"),
            ("[tenants.a]\n[keys]\nbaton-123 = \"a\"", "the key 1 of the tenant \"a\" is not the hash"),
            (&format!("[keys]\n{hash} = \"a\""), "key 1: there is no section [tenants.a]"),
        ] {
            let error = check(text);
            assert!(error.starts_with(reason), "{text}: {error}");
            assert!(!error.contains("123") && !error.contains(&hash.to_string()), "{error}");
        }
    }
}

//! Tenants: the owner of a request, and the limits of its tenant.
//!
//! Suggested reading order: the keys of clients ([`key`]); the file of keys and limits ([`table`]); the
//! limits and their usage ([`limits`]); the tokens of an OpenID provider ([`oidc`]); and trusted proxies, for
//! clusters without keys ([`proxies`]).
//!
//! Without a tenants file and a provider a request has no key, and a trusted proxy may name its tenant.
//! Otherwise only the key or the token determines the tenant.

pub mod key;
pub mod limits;
pub mod oidc;
pub mod proxies;
pub mod table;

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};

use chassis::{World, reload};
use tracing::{error, info};
use types::TenantId;
use types::prompt::Priority;

pub use self::key::ApiKey;
pub use self::limits::{Account, Limit, LimitReached, TenantLimits, TenantPermit};
use self::oidc::fetch::{self, FetchTimes};
pub use self::oidc::{KeySet, KeySource, Oidc, OidcSettings};
pub use self::proxies::TrustedProxies;
pub use self::table::{TableError, TenantTable};
use crate::accept::checked_tenant;
pub use crate::accept::is_name as is_tenant_name;
use crate::admission::AdmissionTerms;
use crate::error::AcceptError;
use crate::metrics::RouterMetrics;

/// The rules of access to the APIs. Cheap to clone. By default no keys are required, and no proxy is trusted.
#[derive(Clone, Debug, Default)]
pub struct Tenants(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    proxies: TrustedProxies,
    /// The keys and tokens of clients; `None`: none are required.
    keys: Option<Keys>,
}

/// The sources of access: a tenants file with its contents, an OpenID provider, or both.
#[derive(Debug)]
pub struct KeySources {
    pub file: Option<TenantsFile>,
    pub oidc: Option<Oidc>,
}

/// A tenants file and its contents.
#[derive(Debug)]
pub struct TenantsFile {
    pub path: PathBuf,
    pub table: TenantTable,
}

/// The sources of access and their current contents.
#[derive(Debug)]
struct Keys {
    /// The tenants file, if there is one. Without it the table is empty.
    file: Option<PathBuf>,
    oidc: Option<Oidc>,
    /// The mutex is held for a clone, never across an await.
    table: RwLock<Arc<TenantTable>>,
    world: World,
    metrics: RouterMetrics,
}

/// The claims of a request about its client, before verification.
#[derive(Clone, Copy, Default)]
pub struct Claims<'a> {
    pub peer: Option<IpAddr>,
    /// The `authorization` header or metadata, unparsed.
    pub authorization: Option<&'a str>,
    pub tenant: Option<&'a str>,
    pub priority: Option<i8>,
}

/// Prints all claims except the key.
impl fmt::Debug for Claims<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { peer, tenant, priority, .. } = self;
        f.debug_struct("Claims")
            .field("peer", peer)
            .field("tenant", tenant)
            .field("priority", priority)
            .finish_non_exhaustive()
    }
}

/// The client of one request, after verification.
#[derive(Clone, Debug)]
pub struct Client {
    pub tenant: TenantId,
    pub priority: Priority,
    /// The account of the tenant; `None`: it has no limits.
    pub account: Option<Arc<Account>>,
}

impl Client {
    fn of(account: Arc<Account>, asked: i8) -> Self {
        let (tenant, priority_max) = (account.tenant().clone(), account.limits().priority_max);
        Self { tenant, priority: Priority(asked.min(priority_max)), account: Some(account) }
    }

    /// Returns the client with the priority that it asks for; `None` if it has no account.
    pub(crate) fn asking(self, priority: i8) -> Option<Self> {
        self.account.map(|account| Self::of(account, priority))
    }

    /// Returns the terms of the client's tenant.
    pub(crate) fn terms(&self) -> AdmissionTerms {
        let Some(account) = &self.account else { return AdmissionTerms::default() };
        let TenantLimits { weight, slo, .. } = *account.limits();
        AdmissionTerms { weight, objective: slo, ..AdmissionTerms::default() }
    }
}

impl Tenants {
    /// Makes rules without keys. Only `proxies` may name tenants.
    pub fn without_keys(proxies: TrustedProxies) -> Self {
        Self(Arc::new(Inner { proxies, keys: None }))
    }

    /// Makes the rules of a router whose clients need an API key or an OpenID token.
    pub fn with_keys(sources: KeySources, world: World, metrics: RouterMetrics) -> Self {
        let KeySources { file, oidc } = sources;
        let (file, table) = match file {
            Some(TenantsFile { path, table }) => (Some(path), table),
            None => (None, TenantTable::default()),
        };
        let keys = Keys { file, oidc, table: RwLock::new(Arc::new(table)), world, metrics };
        Self(Arc::new(Inner { proxies: TrustedProxies::default(), keys: Some(keys) }))
    }

    /// Verifies the claims and returns the client, or refuses the request.
    pub fn client(&self, claims: &Claims<'_>) -> Result<Client, AcceptError> {
        match &self.0.keys {
            None => self.0.proxies.client(claims),
            Some(keys) => keys.client(claims),
        }
    }

    /// Counts one request against its tenant's limits. Returns `None` if the tenant has none.
    pub(crate) fn admit(
        &self,
        client: &Client,
        n_answers: usize,
        prompt_tokens: usize,
    ) -> Result<Option<Arc<TenantPermit>>, AcceptError> {
        let (Some(account), Some(keys)) = (&client.account, &self.0.keys) else { return Ok(None) };
        account.limits().check_answers(n_answers)?;
        let permit = TenantPermit::take(account, keys.world.now(), n_answers, prompt_tokens);
        permit.map(Arc::new).map(Some).map_err(AcceptError::TenantLimit)
    }

    /// Counts a refusal that a limit of the client's tenant caused.
    pub(crate) fn refused(&self, client: &Client, error: &AcceptError) {
        let limit = match error {
            AcceptError::TenantLimit(reached) => reached.limit,
            AcceptError::TenantContext { .. } => Limit::Context,
            _ => return,
        };
        if let Some(keys) = &self.0.keys {
            let labels = [client.tenant.as_str(), limit.as_str()];
            keys.metrics.tenant_refusals.with_label_values(&labels).inc();
        }
    }

    /// Reads the tenants file and the provider's keys at intervals and applies changes, until the future is
    /// dropped. An error changes nothing, and is logged once.
    pub async fn follow_files(self) {
        let Some(keys) = &self.0.keys else { return };
        tokio::join!(keys.follow_table(), keys.follow_provider());
    }
}

impl Keys {
    fn table(&self) -> Arc<TenantTable> {
        self.table.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    async fn follow_table(&self) {
        let Some(file) = &self.file else { return };
        let read = || {
            let (file, previous) = (file.clone(), self.table());
            move || TenantTable::load(&file, Some(&previous))
        };
        let first = self.table().text_hash();
        reload::follow(first, TenantTable::text_hash, read, |loaded| self.take_over(loaded)).await;
    }

    async fn follow_provider(&self) {
        let Some(oidc) = &self.oidc else { return };
        let file = match oidc.source() {
            KeySource::Url(url) => {
                return fetch::follow(oidc, url, FetchTimes::default(), &self.metrics).await;
            }
            KeySource::File(file) => file,
        };
        let read = || {
            let file = file.clone();
            move || KeySet::load(&file)
        };
        let changed = |loaded: Result<KeySet, TableError>| match loaded {
            Ok(new) => {
                info!(n_keys = new.n_keys(), "provider keys reloaded");
                oidc.replace_keys(new);
            }
            Err(error) => {
                error!(%error, "provider keys were not reloaded, the previous ones stay in use");
            }
        };
        reload::follow(oidc.keys().text_hash(), KeySet::text_hash, read, changed).await;
    }

    fn take_over(&self, loaded: Result<TenantTable, TableError>) {
        match loaded {
            Ok(new) => {
                info!(n_keys = new.n_keys(), n_tenants = new.n_tenants(), "tenants file reloaded");
                *self.table.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(new);
                self.metrics.tenants_reloads.with_label_values(&["loaded"]).inc();
            }
            Err(error) => {
                error!(%error, "tenants file was not reloaded, the previous keys and limits stay in use");
                self.metrics.tenants_reloads.with_label_values(&["refused"]).inc();
            }
        }
    }

    /// Returns the client with the key or the token in these claims. Its claim of a tenant is ignored; the
    /// tenant's highest priority limits its own.
    fn client(&self, claims: &Claims<'_>) -> Result<Client, AcceptError> {
        let Some(bearer) = claims.authorization.and_then(bearer) else {
            return Err(self.unauthorized("missing", "give the API key as `authorization: Bearer KEY`"));
        };
        let account = match &self.oidc {
            // An API key has no dots.
            Some(oidc) if bearer.contains('.') => self.account_of_token(oidc, bearer)?,
            _ => self
                .table()
                .find(bearer)
                .ok_or_else(|| self.unauthorized("unknown", "this API key is not known here"))?,
        };
        Ok(Client::of(account, claims.priority.unwrap_or_default()))
    }

    /// Returns the account of a token's tenant: the one of the tenants file, or one with the token's limits.
    fn account_of_token(&self, oidc: &Oidc, token: &str) -> Result<Arc<Account>, AcceptError> {
        let verified = oidc.verify(token, self.world.unix_time());
        let of = verified.map_err(|refused| self.unauthorized("token", refused.reason()))?;
        Ok(self.table().account(&of.tenant).unwrap_or_else(|| oidc.account(of)))
    }

    fn unauthorized(&self, word: &'static str, reason: &'static str) -> AcceptError {
        self.metrics.unauthorized.with_label_values(&[word]).inc();
        AcceptError::Unauthorized { reason }
    }
}

/// Returns the token after `Bearer` in an authorization header.
fn bearer(authorization: &str) -> Option<&str> {
    let (scheme, token) = authorization.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim()).filter(|token| !token.is_empty())
}

impl TrustedProxies {
    /// Returns the client of a request without a key. A trusted proxy may name the tenant and priority; other
    /// peers may not.
    fn client(&self, claims: &Claims<'_>) -> Result<Client, AcceptError> {
        let believed = || claims.peer.is_some_and(|peer| self.include(peer));
        let refused = |header| AcceptError::invalid(header, "the peer is not in router.trusted_proxies");
        if claims.tenant.is_some() && !believed() {
            return Err(refused("x-baton-tenant"));
        }
        if claims.priority.is_some_and(|priority| priority != 0) && !believed() {
            return Err(refused("x-baton-priority"));
        }
        Ok(Client {
            tenant: checked_tenant(claims.tenant)?,
            priority: Priority(claims.priority.unwrap_or_default()),
            account: None,
        })
    }
}

#[cfg(test)]
mod tests;

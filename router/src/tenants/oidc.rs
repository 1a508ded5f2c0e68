//! Access by the tokens of an OpenID provider: signed claims name the tenant and its limits.
//!
//! The provider's public keys are in a JWKS file, which is read again when it changes, or are fetched by URL
//! (`fetch`). Only signatures with a private key are accepted: no `alg: none`, and no HMAC, whose key every
//! verifier would have.

pub(super) mod fetch;

use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use http::Uri;
use jsonwebtoken::errors::{Error, ErrorKind};
use jsonwebtoken::jwk::{AlgorithmParameters, EllipticCurve, Jwk, JwkSet};
use jsonwebtoken::{Algorithm, DecodingKey, Validation, decode, decode_header};
use serde::Deserialize;
use serde_json::{Map, Value};
use tokio::sync::Notify;
use types::TenantId;

use super::limits::{Account, TenantLimits};
use super::table::TableError;
use crate::accept::is_name;

/// The claim with a tenant's limits: an object like a tenant's section of the tenants file.
pub const LIMITS_CLAIM: &str = "baton_limits";
/// The allowed difference between this clock and the provider's.
const LEEWAY: Duration = Duration::from_secs(30);
/// The longest accepted token.
const TOKEN_BYTES_MAX: usize = 16 << 10;
/// Tenants whose usage is remembered. Beyond it, tenants without running requests are forgotten.
const ACCOUNTS_MAX: usize = 10_000;

/// The provider whose tokens are accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OidcSettings {
    pub issuer: String,
    pub audience: String,
    pub keys: KeySource,
    /// The claim with the tenant's name.
    pub tenant_claim: String,
}

/// Where the provider's keys are, a JSON Web Key Set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeySource {
    File(PathBuf),
    Url(Uri),
}

/// The reason why a token is refused. Clients see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenRefused {
    Malformed,
    Algorithm,
    UnknownKey,
    Signature,
    Issuer,
    Audience,
    Expired,
    NotYetValid,
    NoTenant,
    Limits,
}

/// The tenant of a verified token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TokenTenant {
    pub(super) tenant: TenantId,
    pub(super) limits: TenantLimits,
}

/// The provider with its current keys, and the usage of its tenants.
pub struct Oidc {
    settings: OidcSettings,
    /// Locked for a clone, never across an await.
    keys: RwLock<Arc<KeySet>>,
    /// Locked for a look-up, never across an await.
    accounts: Mutex<HashMap<TenantId, Arc<Account>>>,
    /// Signals that a JWT names an unknown signing key, so that the key set is fetched again.
    unknown_key: Notify,
}

/// The keys of a key set, by key id.
pub struct KeySet {
    keys: HashMap<String, VerifyingKey>,
    text_hash: blake3::Hash,
}

struct VerifyingKey {
    key: DecodingKey,
    algorithms: Vec<Algorithm>,
}

#[derive(Deserialize)]
struct TokenClaims {
    /// Seconds since 1970. Some providers write fractions.
    exp: f64,
    nbf: Option<f64>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

impl TokenRefused {
    pub fn reason(self) -> &'static str {
        match self {
            Self::Malformed => "the token is not a JSON Web Token with an expiry",
            Self::Algorithm => "the token's signature algorithm is not accepted",
            Self::UnknownKey => "the token is signed with a key that is not known here",
            Self::Signature => "the token's signature does not match",
            Self::Issuer => "the token is from another issuer",
            Self::Audience => "the token is for another audience",
            Self::Expired => "the token has expired",
            Self::NotYetValid => "the token is not valid yet",
            Self::NoTenant => "the token names no tenant",
            Self::Limits => "the token's limits cannot be read",
        }
    }
}

// === impl Oidc ===

impl Oidc {
    /// Reads the keys of a file, and blocks meanwhile. Keys by URL are fetched later, so that a router starts while
    /// the provider is away: it refuses tokens until then.
    pub fn load(settings: OidcSettings) -> Result<Self, TableError> {
        let keys = match &settings.keys {
            KeySource::File(file) => KeySet::load(file)?,
            KeySource::Url(_) => KeySet::none(),
        };
        let (keys, unknown_key) = (RwLock::new(Arc::new(keys)), Notify::new());
        Ok(Self { settings, keys, accounts: Mutex::default(), unknown_key })
    }

    pub(super) fn source(&self) -> &KeySource {
        &self.settings.keys
    }

    /// Returns once a token has named an unknown key since the last call. Cancel-safe.
    async fn unknown_key(&self) {
        self.unknown_key.notified().await;
    }

    pub(super) fn keys(&self) -> Arc<KeySet> {
        self.keys.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn replace_keys(&self, keys: KeySet) {
        *self.keys.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(keys);
    }

    /// Verifies a token at `now`, counted from 1970.
    pub(super) fn verify(&self, token: &str, now: Duration) -> Result<TokenTenant, TokenRefused> {
        if token.len() > TOKEN_BYTES_MAX {
            return Err(TokenRefused::Malformed);
        }
        let header = decode_header(token).map_err(|error| refused(&error))?;
        let keys = self.keys();
        let Some(key) = keys.find(header.kid.as_deref()) else {
            self.unknown_key.notify_one();
            return Err(TokenRefused::UnknownKey);
        };
        if !key.algorithms.contains(&header.alg) {
            return Err(TokenRefused::Algorithm);
        }
        let mut validation = Validation::new(header.alg);
        validation.set_issuer(&[&self.settings.issuer]);
        validation.set_audience(&[&self.settings.audience]);
        validation.set_required_spec_claims(&["exp", "iss", "aud"]);
        // Checked below with this process's clock.
        validation.validate_exp = false;
        let claims = decode::<TokenClaims>(token, &key.key, &validation);
        let claims = claims.map_err(|error| refused(&error))?.claims;
        claims.check_time(now)?;
        self.tenant(claims.others)
    }

    fn tenant(&self, mut claims: Map<String, Value>) -> Result<TokenTenant, TokenRefused> {
        let limits = claims.remove(LIMITS_CLAIM).map(serde_json::from_value).transpose();
        let limits = limits.map_err(|_| TokenRefused::Limits)?.unwrap_or_default();
        match claims.get(&self.settings.tenant_claim).and_then(Value::as_str) {
            Some(name) if is_name(name) => Ok(TokenTenant { tenant: TenantId::new(name), limits }),
            _ => Err(TokenRefused::NoTenant),
        }
    }

    /// Returns the account of a tenant that is not in the tenants file. It keeps its usage if a token has
    /// other limits.
    pub(super) fn account(&self, of: TokenTenant) -> Arc<Account> {
        let TokenTenant { tenant, limits } = of;
        let mut accounts = self.accounts.lock().unwrap_or_else(PoisonError::into_inner);
        let known = accounts.get(&tenant);
        if let Some(account) = known.filter(|account| *account.limits() == limits) {
            return Arc::clone(account);
        }
        let account = Arc::new(Account::new(tenant.clone(), limits, known.map(|known| &**known)));
        if accounts.len() >= ACCOUNTS_MAX {
            accounts.retain(|_, account| Arc::strong_count(account) > 1);
        }
        accounts.insert(tenant, Arc::clone(&account));
        account
    }
}

impl TokenClaims {
    fn check_time(&self, now: Duration) -> Result<(), TokenRefused> {
        let (now, leeway) = (now.as_secs_f64(), LEEWAY.as_secs_f64());
        if now >= self.exp + leeway {
            return Err(TokenRefused::Expired);
        }
        match self.nbf {
            Some(begin) if now + leeway < begin => Err(TokenRefused::NotYetValid),
            _ => Ok(()),
        }
    }
}

fn refused(error: &Error) -> TokenRefused {
    match error.kind() {
        ErrorKind::InvalidSignature => TokenRefused::Signature,
        ErrorKind::InvalidIssuer => TokenRefused::Issuer,
        ErrorKind::InvalidAudience => TokenRefused::Audience,
        ErrorKind::InvalidAlgorithm | ErrorKind::InvalidAlgorithmName => TokenRefused::Algorithm,
        ErrorKind::MissingRequiredClaim(claim) if claim == "iss" => TokenRefused::Issuer,
        ErrorKind::MissingRequiredClaim(claim) if claim == "aud" => TokenRefused::Audience,
        _ => TokenRefused::Malformed,
    }
}

// === impl KeySet ===

impl KeySet {
    /// Reads the file. Blocks.
    pub fn load(file: &Path) -> Result<Self, TableError> {
        let failed = |reason| TableError::new(file, reason);
        let text = std::fs::read(file).map_err(|error| failed(error.to_string()))?;
        Self::parse(&text).map_err(failed)
    }

    fn none() -> Self {
        Self { keys: HashMap::new(), text_hash: blake3::hash(b"") }
    }

    /// Parses a JSON Web Key Set. An error is its reason.
    fn parse(text: &[u8]) -> Result<Self, String> {
        let set: JwkSet = serde_json::from_slice(text).map_err(|error| error.to_string())?;
        let mut keys = HashMap::new();
        for (nth, jwk) in set.keys.iter().enumerate() {
            let key = VerifyingKey::of(jwk).map_err(|reason| format!("key {}: {reason}", nth + 1))?;
            let Some(key) = key else { continue };
            let id = jwk.common.key_id.clone().unwrap_or_default();
            if keys.insert(id.clone(), key).is_some() {
                return Err(format!("two keys have the id {id:?}"));
            }
        }
        if keys.is_empty() {
            return Err("it has no key for signatures that is accepted".to_owned());
        }
        Ok(Self { keys, text_hash: blake3::hash(text) })
    }

    /// The key with this id. A token without an id needs a set with one key.
    fn find(&self, id: Option<&str>) -> Option<&VerifyingKey> {
        match id {
            Some(id) => self.keys.get(id),
            None if self.keys.len() == 1 => self.keys.values().next(),
            None => None,
        }
    }

    pub(super) fn n_keys(&self) -> usize {
        self.keys.len()
    }

    pub(super) fn text_hash(&self) -> blake3::Hash {
        self.text_hash
    }
}

impl VerifyingKey {
    /// `None` for a key that verifies no signatures of public keys: one for encryption, or of another kind.
    fn of(jwk: &Jwk) -> Result<Option<Self>, String> {
        use Algorithm::{ES256, ES384, EdDSA, PS256, PS384, PS512, RS256, RS384, RS512};
        if matches!(jwk.common.public_key_use, Some(jsonwebtoken::jwk::PublicKeyUse::Encryption)) {
            return Ok(None);
        }
        let possible: &[Algorithm] = match &jwk.algorithm {
            AlgorithmParameters::RSA(_) => &[RS256, RS384, RS512, PS256, PS384, PS512],
            AlgorithmParameters::EllipticCurve(key) => match key.curve {
                EllipticCurve::P256 => &[ES256],
                EllipticCurve::P384 => &[ES384],
                _ => return Ok(None),
            },
            AlgorithmParameters::OctetKeyPair(_) => &[EdDSA],
            AlgorithmParameters::OctetKey(_) => return Ok(None),
        };
        let named = jwk.common.key_algorithm.map(|name| name.to_string());
        let is_named = |algorithm: &Algorithm| {
            named.as_ref().is_none_or(|name| name.parse::<Algorithm>().is_ok_and(|one| one == *algorithm))
        };
        let algorithms: Vec<Algorithm> = possible.iter().copied().filter(is_named).collect();
        if algorithms.is_empty() {
            return Ok(None);
        }
        let key = DecodingKey::from_jwk(jwk).map_err(|error| error.to_string())?;
        Ok(Some(Self { key, algorithms }))
    }
}

impl fmt::Debug for Oidc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Oidc").field("settings", &self.settings).finish_non_exhaustive()
    }
}

impl fmt::Debug for KeySet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeySet").field("n_keys", &self.keys.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;

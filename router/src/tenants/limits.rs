//! The limits of a tenant, and its current usage.

use std::num::{NonZeroU32, NonZeroU64};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::Deserialize;
use tokio::time::Instant;
use types::TenantId;

use crate::admission::{Objective, TenantWeight};
use crate::error::AcceptError;

/// The time after which a client whose tenant has too many running requests should try again.
const RETRY_AFTER: Duration = Duration::from_secs(1);
const MINUTE: f64 = 60.0;

/// A tenant's section in the tenants file. `None` means no limit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TenantLimits {
    /// The limit of concurrent answers. A request with `n` counts `n`.
    pub requests_max: Option<NonZeroU32>,
    /// The limit of prompt and answer tokens per minute. New requests are refused while a full minute's
    /// tokens are used up.
    pub tokens_per_minute: Option<NonZeroU64>,
    /// The longest prompt and answer together, in tokens.
    pub context_tokens_max: Option<NonZeroU32>,
    /// The highest priority of the tenant's requests. Higher ones are reduced to it.
    pub priority_max: i8,
    /// While requests wait, tenants of one priority are served in proportion to their weights.
    pub weight: TenantWeight,
    /// The objective of requests that name none in `x-baton-slo`.
    pub slo: Objective,
}

impl TenantLimits {
    /// Refuses a request with more answers than may ever run together.
    pub(crate) fn check_answers(&self, n_answers: usize) -> Result<(), AcceptError> {
        match self.requests_max {
            Some(max) if n_answers > max.get() as usize => {
                let reason =
                    format!("{n_answers} answers are more than the tenant's {max} concurrent requests");
                Err(AcceptError::invalid("n", reason))
            }
            _ => Ok(()),
        }
    }
}

/// The kind of limit that refuses a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    Requests,
    Tokens,
    Context,
}

impl Limit {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Requests => "requests",
            Self::Tokens => "tokens_per_minute",
            Self::Context => "context",
        }
    }
}

/// The error of a request whose tenant is at a limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitReached {
    pub limit: Limit,
    pub retry_after: Duration,
    pub reason: String,
}

/// One tenant with its limits. A reload of the limits makes a new account that shares the usage.
#[derive(Debug)]
pub struct Account {
    tenant: TenantId,
    limits: TenantLimits,
    usage: Arc<Mutex<Usage>>,
}

/// The current usage of a tenant. Its mutex is held for a few additions, never across an await.
#[derive(Debug, Default)]
struct Usage {
    requests: u32,
    /// Tokens that count against the rate. They decrease with time, by the rate.
    tokens: f64,
    at: Option<Instant>,
}

impl Account {
    /// Makes an account. It shares the usage of `previous`, the same tenant's account before a reload.
    pub fn new(tenant: TenantId, limits: TenantLimits, previous: Option<&Self>) -> Self {
        let usage = previous.map(|previous| Arc::clone(&previous.usage)).unwrap_or_default();
        Self { tenant, limits, usage }
    }

    pub fn tenant(&self) -> &TenantId {
        &self.tenant
    }

    pub fn limits(&self) -> &TenantLimits {
        &self.limits
    }

    fn usage(&self) -> MutexGuard<'_, Usage> {
        self.usage.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Usage {
    fn check(&self, limits: &TenantLimits, n: u32) -> Result<(), LimitReached> {
        if let Some(max) = limits.requests_max
            && self.requests + n > max.get()
        {
            let reason = format!("{} of the tenant's {max} concurrent requests are running", self.requests);
            return Err(LimitReached { limit: Limit::Requests, retry_after: RETRY_AFTER, reason });
        }
        if let Some(rate) = limits.tokens_per_minute
            && self.tokens >= rate.get() as f64
        {
            let over = self.tokens - rate.get() as f64;
            let retry_after = Duration::from_secs_f64((over + 1.0) * MINUTE / rate.get() as f64);
            let reason = format!("the tenant's {rate} tokens per minute are used up");
            return Err(LimitReached { limit: Limit::Tokens, retry_after, reason });
        }
        Ok(())
    }

    /// Counts tokens that are used at `now`, if the tenant has a rate.
    fn charge(&mut self, rate: Option<NonZeroU64>, now: Instant, tokens: f64) {
        let Some(rate) = rate else { return };
        let elapsed = self.at.map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        let decayed = self.tokens - elapsed.as_secs_f64() * rate.get() as f64 / MINUTE;
        self.tokens = decayed.max(0.0) + tokens;
        self.at = Some(now);
    }
}

/// One request in its tenant's usage. Dropping it ends the count of its answers. If no token was generated,
/// the prompt's tokens are returned too.
#[derive(Debug)]
pub struct TenantPermit {
    account: Arc<Account>,
    n_answers: u32,
    prompt_tokens: f64,
    /// Whether a token was generated, so that the prompt's tokens count as used.
    has_begun: AtomicBool,
}

impl TenantPermit {
    /// Counts a request with this many answers and prompt tokens at `now`, or refuses it by the tenant's
    /// limits.
    pub fn take(
        account: &Arc<Account>,
        now: Instant,
        n_answers: usize,
        prompt_tokens: usize,
    ) -> Result<Self, LimitReached> {
        let n_answers = n_answers as u32;
        let rate = account.limits.tokens_per_minute;
        let prompt_tokens = if rate.is_some() { prompt_tokens as f64 } else { 0.0 };
        let mut usage = account.usage();
        usage.charge(rate, now, 0.0);
        usage.check(&account.limits, n_answers)?;
        usage.charge(rate, now, prompt_tokens);
        usage.requests += n_answers;
        drop(usage);
        Ok(Self { account: Arc::clone(account), n_answers, prompt_tokens, has_begun: AtomicBool::new(false) })
    }

    /// Counts one generated token at `now`.
    pub fn generated(&self, now: Instant) {
        self.has_begun.store(true, Ordering::Relaxed);
        let rate = self.account.limits.tokens_per_minute;
        if rate.is_some() {
            self.account.usage().charge(rate, now, 1.0);
        }
    }
}

impl Drop for TenantPermit {
    fn drop(&mut self) {
        let mut usage = self.account.usage();
        usage.requests -= self.n_answers;
        if !*self.has_begun.get_mut() {
            usage.tokens = (usage.tokens - self.prompt_tokens).max(0.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn account(requests_max: u32, tokens_per_minute: u64) -> Arc<Account> {
        let limits = TenantLimits {
            requests_max: NonZeroU32::new(requests_max),
            tokens_per_minute: NonZeroU64::new(tokens_per_minute),
            ..TenantLimits::default()
        };
        Arc::new(Account::new(TenantId::new("acme"), limits, None))
    }

    fn limit(taken: Result<TenantPermit, LimitReached>) -> (Limit, Duration) {
        let reached = taken.expect_err("refused");
        (reached.limit, reached.retry_after)
    }

    #[tokio::test(start_paused = true)]
    async fn a_dropped_permit_gives_its_places_back() {
        let (account, now) = (account(3, 0), Instant::now());
        let two = TenantPermit::take(&account, now, 2, 10).expect("room");
        assert_eq!(limit(TenantPermit::take(&account, now, 2, 10)), (Limit::Requests, RETRY_AFTER));
        let _one = TenantPermit::take(&account, now, 1, 10).expect("room for one");
        drop(two);
        TenantPermit::take(&account, now, 2, 10).expect("room again");
    }

    #[tokio::test(start_paused = true)]
    async fn a_minutes_tokens_come_back_in_a_minute() {
        let (account, now) = (account(0, 60), Instant::now());
        let permit = TenantPermit::take(&account, now, 1, 50).expect("nothing is used yet");
        for _ in 0..20 {
            permit.generated(now);
        }
        drop(permit);
        let after = Duration::from_secs(11);
        assert_eq!(limit(TenantPermit::take(&account, now, 1, 1)), (Limit::Tokens, after));
        TenantPermit::take(&account, now + after, 1, 1).expect("after the time that was said");
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_without_a_token_costs_nothing() {
        let (account, now) = (account(0, 60), Instant::now());
        let permit = TenantPermit::take(&account, now, 1, 500).expect("nothing is used yet");
        assert_eq!(limit(TenantPermit::take(&account, now, 1, 1)).0, Limit::Tokens);
        drop(permit);
        TenantPermit::take(&account, now, 1, 1).expect("it was given back");
    }

    #[tokio::test(start_paused = true)]
    async fn usage_survives_a_reload() {
        let (old, now) = (account(1, 0), Instant::now());
        let permit = TenantPermit::take(&old, now, 1, 1).expect("room");
        let limits = TenantLimits { requests_max: NonZeroU32::new(2), ..TenantLimits::default() };
        let new = Arc::new(Account::new(TenantId::new("acme"), limits, Some(&old)));
        let _second = TenantPermit::take(&new, now, 1, 1).expect("the limit was raised");
        assert_eq!(limit(TenantPermit::take(&new, now, 1, 1)).0, Limit::Requests);
        drop(permit);
        TenantPermit::take(&new, now, 1, 1).expect("the old permit gave its place back");
    }
}

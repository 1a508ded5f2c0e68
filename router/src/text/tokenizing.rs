//! Tokenizes prompts: short texts at once, and the rest on separate threads, where it delays no other request.

use std::num::NonZero;
use std::sync::Arc;

use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;
use types::{Deadline, TokenId};

use super::ServedModel;
use super::tokenizer::{CacheScope, PromptText, TextEncoding};
use crate::admission::RefusalReason;
use crate::error::{EncodeError, RETRY_AFTER, ServeError};
use crate::metrics::RouterMetrics;

/// The bytes that are tokenized at once. A tokenizer takes about a microsecond for two, and the router's own threads must
/// not be blocked for more than half a millisecond.
const TOKENIZED_AT_ONCE: usize = 1 << 10;

/// The bytes of a body that is parsed at once, which takes about as long.
const PARSED_AT_ONCE: usize = 16 << 10;

/// The bytes of texts that may wait for one thread: eight seconds of its work.
const WAITING_BYTES_PER_THREAD: usize = 16 << 20;

/// The threads for long texts, and their work. Clones share them.
#[derive(Clone, Debug)]
pub struct Tokenizing {
    /// A permit for each thread. Half of the cores are left to requests that have their tokens.
    turns: Arc<Semaphore>,
    /// A permit for each byte that may wait.
    room: Arc<Semaphore>,
    bytes_max: usize,
    metrics: Arc<RouterMetrics>,
}

impl Tokenizing {
    pub fn new(metrics: RouterMetrics) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
        Self::with_threads(cores.div_ceil(2), metrics)
    }

    fn with_threads(n_threads: usize, metrics: RouterMetrics) -> Self {
        let bytes_max = n_threads * WAITING_BYTES_PER_THREAD;
        let [turns, room] = [n_threads, bytes_max].map(|permits| Arc::new(Semaphore::new(permits)));
        Self { turns, room, bytes_max, metrics: Arc::new(metrics) }
    }

    /// Returns the bytes of texts that wait for a thread.
    pub fn waiting_bytes(&self) -> usize {
        self.bytes_max - self.room.available_permits()
    }

    /// Tokenizes a text.
    pub async fn tokens(
        &self,
        model: &ServedModel,
        text: PromptText,
        scope: CacheScope,
        deadline: Deadline,
    ) -> Result<Result<Vec<TokenId>, EncodeError>, ServeError> {
        let mut encoding = TextEncoding::new(Arc::clone(&model.tokenizer), text, scope);
        let encoded = match encoding.advance(TOKENIZED_AT_ONCE) {
            Ok(false) => {
                let n_bytes = encoding.bytes_left();
                let rest = move || encoding.advance(usize::MAX).map(|_| encoding);
                self.run(n_bytes, deadline, rest).await?
            }
            begun => begun.map(|_| encoding),
        };
        Ok(encoded.map(|encoding| {
            let (tokens, counts) = encoding.into_tokens();
            self.metrics.text.tokenized(counts);
            tokens
        }))
    }

    /// Parses a body of `n_bytes`.
    pub async fn parse<T: Send + 'static>(
        &self,
        n_bytes: usize,
        deadline: Deadline,
        parse: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, ServeError> {
        if n_bytes <= PARSED_AT_ONCE { Ok(parse()) } else { self.run(n_bytes, deadline, parse).await }
    }

    /// Runs work on a thread. Dropping the future leaves the line, or discards the result.
    async fn run<T: Send + 'static>(
        &self,
        n_bytes: usize,
        deadline: Deadline,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, ServeError> {
        let n_permits = u32::try_from(n_bytes.min(self.bytes_max)).unwrap_or(u32::MAX);
        let Ok(room) = self.room.try_acquire_many(n_permits) else { return Err(self.refusal()) };
        let turn =
            tokio::time::timeout_at(deadline.instant().into(), Arc::clone(&self.turns).acquire_owned());
        let late =
            |_| ServeError::DeadlinePassed { reason: "the prompt was not tokenized in time".to_owned() };
        let turn = turn.await.map_err(late)?.expect("the semaphore is never closed");
        drop(room);
        // The thread holds the turn: work goes on after its request is dropped.
        let work = spawn_blocking(move || {
            let _turn = turn;
            work()
        });
        work.await.map_err(|error| ServeError::Failed { reason: error.to_string() })
    }

    fn refusal(&self) -> ServeError {
        self.metrics.line.refused(RefusalReason::Text);
        let reason = "too much text waits to be tokenized".to_owned();
        ServeError::Overloaded { retry_after: RETRY_AFTER, reason }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::time::Duration;

    use chassis::World;
    use chassis::metrics::Metrics;
    use futures::poll;

    use super::*;
    use crate::text::Tokenizer;
    use crate::text::tokenizer::HuggingFace;

    const HALF: usize = WAITING_BYTES_PER_THREAD / 2;

    fn one_thread(page: &Metrics) -> Tokenizing {
        Tokenizing::with_threads(1, RouterMetrics::new(page))
    }

    #[tokio::test(start_paused = true)]
    async fn waiting_texts_are_bounded_and_leave_with_their_requests() {
        let page = Metrics::new("router");
        let (tokenizing, deadline) =
            (one_thread(&page), World::seeded(1).deadline_in(Duration::from_secs(5)));
        let busy = tokenizing.turns.try_acquire().expect("no work yet");
        let mut first = Box::pin(tokenizing.parse(HALF, deadline, || 1));
        let mut second = pin!(tokenizing.parse(HALF, deadline, || 2));
        assert!(poll!(&mut first).is_pending() && poll!(&mut second).is_pending());
        assert_eq!(tokenizing.waiting_bytes(), 2 * HALF);
        let refused = tokenizing.parse(PARSED_AT_ONCE + 1, deadline, || 3).await.expect_err("no room");
        assert!(matches!(refused, ServeError::Overloaded { .. }), "{refused}");
        assert_eq!(tokenizing.parse(PARSED_AT_ONCE, deadline, || 4).await, Ok(4), "it costs little");
        drop(first);
        assert_eq!(tokenizing.waiting_bytes(), HALF);
        drop(busy);
        assert_eq!(second.await, Ok(2));
        assert_eq!((tokenizing.waiting_bytes(), tokenizing.turns.available_permits()), (0, 1));
        assert!(page.page().contains("baton_router_line_refusals_total{reason=\"text\"} 1"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_text_waits_until_its_deadline() {
        let (tokenizing, world) = (one_thread(&Metrics::new("router")), World::seeded(1));
        let _busy = tokenizing.turns.try_acquire().expect("no work yet");
        let late = tokenizing.parse(HALF, world.deadline_in(Duration::from_secs(5)), || ()).await;
        assert!(matches!(late, Err(ServeError::DeadlinePassed { .. })), "{late:?}");
        assert_eq!(tokenizing.waiting_bytes(), 0);
    }

    #[tokio::test]
    async fn a_long_text_is_tokenized_once() {
        let page = Metrics::new("router");
        let (tokenizing, deadline) =
            (one_thread(&page), World::seeded(1).deadline_in(Duration::from_secs(60)));
        let json = include_bytes!("../../../models/demo/tokenizer.json");
        let tokenizer = Tokenizer::HuggingFace(Box::new(HuggingFace::new(json).expect("the demo model's")));
        let model = ServedModel { tokenizer: tokenizer.into(), ..ServedModel::mock("demo", 64) };
        let text = format!("<|user|>{}<|end|>", "word ".repeat(1000));
        let expected = model.tokenizer.encode(&text).expect("it encodes");
        for _ in 0..2 {
            let text = PromptText::Rendered(text.clone());
            let tokens = tokenizing.tokens(&model, text, CacheScope::default(), deadline).await;
            assert_eq!(tokens, Ok(Ok(expected.clone())));
        }
        for line in [
            "baton_router_text_pieces_total{found=\"no\"} 2",
            "baton_router_text_pieces_total{found=\"yes\"} 2",
            &format!("baton_router_tokenized_bytes_total {}", text.len()),
        ] {
            assert!(page.page().contains(line), "{line} in\n{}", page.page());
        }
    }
}

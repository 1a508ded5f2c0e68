//! Hot path.
//! A few threads that share one job at a time.
//!
//! A decode step of a small model is hundreds of jobs of a few microseconds each, one after the other. Other
//! nodes may use the machine too. So the calling thread works too, threads claim one part at a time, and the
//! caller does not wait for a helper that has not started. A helper that the system does not schedule thus
//! costs nothing, unlike with a barrier or a fixed share for each thread. Between two jobs a helper polls
//! briefly, yielding to other threads, and then sleeps.

use std::fmt;
use std::io;
use std::num::NonZero;
use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

/// The number of polls, with yields between them, before a thread sleeps: some tens of microseconds.
const LOOKS: usize = 40;
/// The number of spin hints between two polls.
const PAUSES_PER_LOOK: usize = 32;

/// Threads for [`Pool::run`]. Dropping it ends them.
pub struct Pool {
    shared: Arc<Shared>,
    helpers: Vec<thread::JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    /// Signalled when there is a job, or when the pool ends.
    work: Condvar,
    /// Signalled when the last helper leaves a job.
    left: Condvar,
    /// The number of jobs so far. Helpers poll it without the lock, because it changes with every job.
    n_jobs: AtomicUsize,
}

struct State {
    /// The job that helpers may join. It is on the stack of the thread in `run`, which removes it before it
    /// returns.
    job: Option<JobRef>,
    /// The number of the job, counted from the pool's start.
    n_jobs: usize,
    /// The number of helpers that work on the job.
    joined: usize,
    ended: bool,
}

#[derive(Clone, Copy)]
struct JobRef(*const PoolJob<'static>);

// SAFETY: a `PoolJob` is Sync (see its fields). `Pool::run` keeps it alive while any thread can access it.
unsafe impl Send for JobRef {}

struct PoolJob<'a> {
    part: &'a (dyn Fn(usize) + Sync),
    n_parts: usize,
    next: AtomicUsize,
    panicked: AtomicBool,
}

// === impl Pool ===

impl Pool {
    /// Starts the helpers. `threads` includes the caller of [`Pool::run`], so one thread fewer is started.
    pub fn new(threads: NonZero<usize>) -> io::Result<Self> {
        let state = State { job: None, n_jobs: 0, joined: 0, ended: false };
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            work: Condvar::new(),
            left: Condvar::new(),
            n_jobs: AtomicUsize::new(0),
        });
        let mut pool = Self { shared, helpers: Vec::new() };
        for nth in 1..threads.get() {
            let shared = Arc::clone(&pool.shared);
            let helper = thread::Builder::new().name(format!("compute-{nth}"));
            pool.helpers.push(helper.spawn(move || shared.help())?);
        }
        Ok(pool)
    }

    pub fn threads(&self) -> usize {
        self.helpers.len() + 1
    }

    /// Calls `part` once for every number below `n_parts`, on this thread and on helpers. Returns when all
    /// calls are done.
    ///
    /// If it is called from within a part, or while another thread runs a job, the calling thread does all
    /// parts.
    ///
    /// # Panics
    /// If a part panics.
    pub fn run(&self, n_parts: usize, part: &(dyn Fn(usize) + Sync)) {
        let job = PoolJob { part, n_parts, next: AtomicUsize::new(0), panicked: AtomicBool::new(false) };
        let shown = (n_parts > 1 && !self.helpers.is_empty()).then(|| self.shared.show(&job)).flatten();
        job.work();
        drop(shown);
        assert!(!job.panicked.load(Ordering::Relaxed), "a part of the work panicked on a helper thread");
    }

    /// Like [`Pool::run`], with a mutable part of `data` for each call: `part_len` elements, fewer in the
    /// last.
    pub fn run_on<T: Send>(&self, data: &mut [T], part_len: usize, part: impl Fn(usize, &mut [T]) + Sync) {
        let cells: Vec<Mutex<&mut [T]>> = data.chunks_mut(part_len).map(Mutex::new).collect();
        self.run(cells.len(), &|nth| {
            part(nth, &mut cells[nth].lock().unwrap_or_else(PoisonError::into_inner))
        });
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.lock().ended = true;
        self.shared.n_jobs.fetch_add(1, Ordering::Release);
        self.shared.work.notify_all();
        for helper in self.helpers.drain(..) {
            // A helper catches the panics of its parts, so this result is ignored.
            let _ = helper.join();
        }
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("threads", &self.threads()).finish()
    }
}

// === impl Shared ===

/// A job that helpers can see. Dropping it removes the job and waits for the helpers that joined.
struct SharedState<'a>(&'a Shared);

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // No code panics while it holds this lock, so the state is valid even if the lock is poisoned.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Shows `job` to helpers. Returns `None` if they are busy with another job.
    fn show(&self, job: &PoolJob<'_>) -> Option<SharedState<'_>> {
        let mut state = self.lock();
        if state.job.is_some() || state.joined > 0 {
            return None;
        }
        // JUSTIFICATION: helpers outlive a call, so their reference to the job cannot have a lifetime.
        // The returned `Shown` removes the pointer and waits until no helper uses it. `run` drops it before
        // the job, also when a part panics.
        state.job = Some(JobRef(std::ptr::from_ref(job).cast()));
        state.n_jobs += 1;
        self.n_jobs.store(state.n_jobs, Ordering::Release);
        drop(state);
        self.work.notify_all();
        Some(SharedState(self))
    }

    /// Runs a helper thread: works on jobs until the pool ends.
    fn help(&self) {
        let mut seen = 0;
        while let Some(job) = self.join(&mut seen) {
            // SAFETY: `joined` counts this helper, so the job's owner is still in `run` and waits.
            let job = unsafe { &*job.0 };
            if panic::catch_unwind(AssertUnwindSafe(|| job.work())).is_err() {
                job.panicked.store(true, Ordering::Relaxed);
            }
            self.leave();
        }
    }

    /// Waits for a job that this helper has not seen. Returns `None` when the pool ends.
    fn join(&self, seen: &mut usize) -> Option<JobRef> {
        look_for(|| self.n_jobs.load(Ordering::Acquire) != *seen);
        let mut state = self.lock();
        loop {
            if state.ended {
                return None;
            }
            let fresh = state.job.filter(|_| state.n_jobs != *seen);
            *seen = state.n_jobs;
            if let Some(job) = fresh {
                state.joined += 1;
                return Some(job);
            }
            state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn leave(&self) {
        let mut state = self.lock();
        state.joined -= 1;
        if state.joined == 0 && state.job.is_none() {
            self.left.notify_all();
        }
    }
}

impl Drop for SharedState<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.job = None;
        // A part takes tens of microseconds, so this thread polls before it sleeps.
        for _ in 0..LOOKS {
            if state.joined == 0 {
                return;
            }
            drop(state);
            give_way();
            state = self.0.lock();
        }
        while state.joined > 0 {
            state = self.0.left.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl PoolJob<'_> {
    /// Calls the job's parts until none is left.
    fn work(&self) {
        loop {
            let nth = self.next.fetch_add(1, Ordering::Relaxed);
            if nth >= self.n_parts {
                return;
            }
            (self.part)(nth);
        }
    }
}

/// Polls `found` a few times. Returns when it is true, and also if it stays false.
fn look_for(found: impl Fn() -> bool) {
    for _ in 0..LOOKS {
        if found() {
            return;
        }
        give_way();
    }
}

/// Spins briefly, then yields the core to other threads.
fn give_way() {
    for _ in 0..PAUSES_PER_LOOK {
        std::hint::spin_loop();
    }
    thread::yield_now();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(threads: usize) -> Pool {
        Pool::new(NonZero::new(threads).unwrap()).unwrap()
    }

    #[test]
    fn every_part_is_done_once() {
        for threads in [1, 2, 5] {
            let pool = pool(threads);
            for n_parts in [0, 1, 2, 7, 1000] {
                let counts: Vec<AtomicUsize> = (0..n_parts).map(|_| AtomicUsize::new(0)).collect();
                pool.run(n_parts, &|nth| {
                    counts[nth].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1), "{threads} {n_parts}");
            }
        }
    }

    #[test]
    fn many_short_jobs_follow_each_other() {
        let pool = pool(3);
        let total = AtomicUsize::new(0);
        for _ in 0..20_000 {
            pool.run(3, &|nth| {
                total.fetch_add(nth, Ordering::Relaxed);
            });
        }
        assert_eq!(total.into_inner(), 60_000);
    }

    #[test]
    fn parts_of_data_are_disjoint() {
        let mut data = vec![0usize; 103];
        pool(3).run_on(&mut data, 10, |nth, part| part.fill(nth));
        assert!(data.iter().enumerate().all(|(i, nth)| i / 10 == *nth));
    }

    #[test]
    fn work_within_work_is_done_on_the_spot() {
        let pool = pool(2);
        let total = AtomicUsize::new(0);
        pool.run(4, &|_| {
            pool.run(4, &|_| {
                total.fetch_add(1, Ordering::Relaxed);
            });
        });
        assert_eq!(total.into_inner(), 16);
    }

    #[test]
    fn a_panic_comes_back_and_the_pool_lives_on() {
        let pool = pool(2);
        for _ in 0..50 {
            let outcome = panic::catch_unwind(AssertUnwindSafe(|| pool.run(8, &|nth| assert!(nth != 5))));
            assert!(outcome.is_err());
        }
        let total = AtomicUsize::new(0);
        pool.run(8, &|_| {
            total.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(total.into_inner(), 8);
    }
}

//! Hot path.
//! Numbers that the steps of one GPU leave for another GPU, in a ring of places.
//!
//! The sender copies its numbers to a place in its own memory, and the receiver fetches them from there. Streams wait
//! for each other by events, and the host waits for no GPU. A place may be written again when the steps that fetched
//! it have ended, which the caller ensures.

use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use cudarc::driver::{CudaContext, result};

use super::buffer::{Buffer, Element, View, ViewMut};
use super::{Card, CudaError, Event};

/// The sender's end of a ring.
pub struct Outbox<T: Element> {
    ring: Arc<Ring<T>>,
    written: SyncSender<(usize, Event)>,
}

/// The receiver's end of a ring.
pub struct Inbox<T: Element> {
    ring: Arc<Ring<T>>,
    arrivals: Arrivals<Event>,
}

/// Memory of the sender's GPU, which lives as long as one of the two ends.
struct Ring<T: Element> {
    context: Arc<CudaContext>,
    numbers: Buffer<T>,
    place_len: usize,
}

/// The events of the places, by which a receiver's stream waits for them.
struct Arrivals<E> {
    written: Receiver<(usize, E)>,
    of_places: Vec<Option<E>>,
}

/// Makes a ring of `n_places` places with `place_len` numbers each, in the memory of `from`.
///
/// # Panics
/// If there is no place.
pub fn hand_over<T: Element>(
    from: &Card,
    n_places: usize,
    place_len: usize,
) -> Result<(Outbox<T>, Inbox<T>), CudaError> {
    assert!(n_places > 0, "a ring has a place");
    let numbers = from.buffer(n_places * place_len)?;
    let ring = Arc::new(Ring { context: Arc::clone(from.context()), numbers, place_len });
    let (written, arrivals) = Arrivals::of_places(n_places);
    Ok((Outbox { ring: Arc::clone(&ring), written }, Inbox { ring, arrivals }))
}

// === impl Outbox ===

impl<T: Element> Outbox<T> {
    /// Copies the numbers of all `parts` to a place, one part after the other, after all earlier work of the stream.
    ///
    /// # Panics
    /// If there is no such place, if it is too short, or if the memory is on another GPU.
    pub fn put(&mut self, card: &Card, place: usize, parts: &[View<'_, T>]) -> Result<(), CudaError> {
        let mut start = place * self.ring.place_len;
        let end = start + self.ring.place_len;
        for part in parts {
            assert!(start + part.len() <= end, "{} numbers at {start} of a place up to {end}", part.len());
            let to = self.ring.numbers.slice(start..start + part.len());
            // Only this end writes the ring, so a writable view has no other user.
            card.copy(ViewMut::over(to.address(), to.len(), to.ordinal()), *part)?;
            start += part.len();
        }
        let lost = |_| peer_lost("the receiver of its numbers does not take them");
        self.written.try_send((place, card.event()?)).map_err(lost)
    }

    /// Returns all places, one after the other.
    pub fn places(&self) -> View<'_, T> {
        self.ring.numbers.view()
    }
}

// === impl Inbox ===

impl<T: Element> Inbox<T> {
    /// Makes the stream wait for the next numbers in a place. The host waits until the sender has launched the work
    /// that writes them.
    pub fn wait_for_next(&mut self, card: &Card, place: usize, within: Duration) -> Result<(), CudaError> {
        let written = self.arrivals.next(place, within)?;
        card.wait_for(&written)
    }

    /// Makes the stream wait for the last numbers that the sender has put in a place. Several steps may fetch them.
    pub fn wait_for_last(&mut self, card: &Card, place: usize) -> Result<(), CudaError> {
        let written = self.arrivals.last(place)?;
        card.wait_for(written)
    }

    /// Takes note of all places that were written, so that the sender has room for more.
    pub fn note(&mut self) {
        self.arrivals.note();
    }

    /// Copies numbers of a place, from `start` on, to this GPU's memory, in stream order.
    ///
    /// # Panics
    /// If the place does not have them, or `to` is on another GPU.
    pub fn fetch(
        &self,
        card: &Card,
        place: usize,
        start: usize,
        to: ViewMut<'_, T>,
    ) -> Result<(), CudaError> {
        let Ring { context, numbers, place_len } = &*self.ring;
        assert!(start + to.len() <= *place_len, "{} numbers from {start} on of {place_len}", to.len());
        let first = place * place_len + start;
        let from = numbers.slice(first..first + to.len());
        if context.ordinal() == card.ordinal() {
            return card.copy(to, from);
        }
        assert_eq!(to.ordinal(), card.ordinal(), "the memory is on this GPU");
        card.bind()?;
        let (here, there, bytes) = (card.context().cu_ctx(), context.cu_ctx(), to.len() * size_of::<T>());
        // JUSTIFICATION: GPU memory is accessed by address.
        // SAFETY: both ranges exist and have this length. The ring lives as long as this value, whose owner waits for
        // the stream before it drops it.
        unsafe {
            result::memcpy_peer_async(
                here,
                to.address(),
                there,
                from.address(),
                bytes,
                card.stream().cu_stream(),
            )
        }
        .map_err(CudaError::during("copy from another GPU"))
    }
}

impl<T: Element> fmt::Debug for Outbox<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Outbox({:?})", self.ring.numbers)
    }
}

impl<T: Element> fmt::Debug for Inbox<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Inbox({:?})", self.ring.numbers)
    }
}

// === impl Arrivals ===

impl<E> Arrivals<E> {
    fn of_places(n_places: usize) -> (SyncSender<(usize, E)>, Self) {
        let (sender, written) = sync_channel(n_places);
        (sender, Self { written, of_places: (0..n_places).map(|_| None).collect() })
    }

    /// Waits until a place is written, and takes its event.
    fn next(&mut self, place: usize, within: Duration) -> Result<E, CudaError> {
        loop {
            if let Some(event) = self.of_places[place].take() {
                return Ok(event);
            }
            let lost = |_| peer_lost("it did not launch the work that another one waits for");
            let (written, event) = self.written.recv_timeout(within).map_err(lost)?;
            self.of_places[written] = Some(event);
        }
    }

    /// Returns the event of a place that was written before.
    fn last(&mut self, place: usize) -> Result<&E, CudaError> {
        self.note();
        self.of_places[place].as_ref().ok_or_else(|| peer_lost("its numbers are missing"))
    }

    fn note(&mut self) {
        while let Ok((written, event)) = self.written.try_recv() {
            self.of_places[written] = Some(event);
        }
    }
}

fn peer_lost(why: &str) -> CudaError {
    CudaError::PeerLost { why: why.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_secs(20);

    #[test]
    fn places_are_waited_for_in_any_order_and_taken_once() {
        let (sender, mut arrivals) = Arrivals::of_places(3);
        for (place, event) in [(0, 'a'), (2, 'b'), (1, 'c')] {
            sender.try_send((place, event)).expect("there is room");
        }
        assert!(sender.try_send((0, 'x')).is_err(), "a place more than there are");
        assert_eq!(arrivals.next(2, SOON).expect("it is written"), 'b');
        assert_eq!(arrivals.next(0, SOON).expect("it was written before"), 'a');
        assert_eq!(arrivals.next(1, SOON).expect("it is written"), 'c');
        let late = arrivals.next(1, Duration::from_millis(1)).expect_err("it was taken");
        assert!(late.to_string().contains("did not launch the work"), "{late}");
    }

    #[test]
    fn the_last_event_of_a_place_stays_until_the_next() {
        let (sender, mut arrivals) = Arrivals::of_places(2);
        assert!(arrivals.last(0).is_err(), "nothing is written yet");
        sender.try_send((0, 'a')).expect("there is room");
        for _ in 0..2 {
            assert_eq!(*arrivals.last(0).expect("it is written"), 'a');
        }
        sender.try_send((0, 'b')).expect("there is room");
        assert_eq!(*arrivals.last(0).expect("it is written again"), 'b');
        drop(sender);
        assert_eq!(*arrivals.last(0).expect("it stays"), 'b');
        assert!(arrivals.next(1, SOON).is_err(), "the sender is gone");
    }
}

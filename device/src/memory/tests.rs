use std::fmt;

use super::*;
use crate::borrow::{Access, BorrowRefusal};

const SHAPE: RegionShape = RegionShape { page_bytes: 64, n_pages: 8 };

fn memory() -> HostMemory {
    HostMemory::new(&[SHAPE, RegionShape { page_bytes: 100, n_pages: 3 }]).expect("a few KiB can be mapped")
}

#[test]
fn memory_is_zero_and_keeps_what_was_written() {
    let memory = memory();
    assert!(memory.read(1, 0..3).expect("idle").iter().all(|byte| *byte == 0));
    memory.write(0, 2..4).expect("idle").fill(7);
    let run = memory.read(0, 1..5).expect("idle");
    assert_eq!(run.len(), 4 * 64);
    assert!(run[..64].iter().all(|byte| *byte == 0));
    assert!(run[64..192].iter().all(|byte| *byte == 7));
    assert!(run[192..].iter().all(|byte| *byte == 0));
}

#[test]
fn pages_do_not_overlap_between_regions() {
    let memory = memory();
    memory.write(0, 0..8).expect("idle").fill(1);
    memory.write(1, 0..3).expect("idle").fill(2);
    assert!(memory.read(0, 0..8).expect("idle").iter().all(|byte| *byte == 1));
    assert!(memory.read(1, 0..3).expect("idle").iter().all(|byte| *byte == 2));
    assert_eq!(memory.bytes(), 8 * 64 + 300);
}

/// Checks the result of a second borrow of pages 3..6 while a first borrow is held.
#[test]
fn aliasing_table() {
    use Access::{Read, Write};
    for (first, pages, second, met) in [
        (Read, 0..8, Read, None),
        (Read, 5..7, Write, Some((5, BorrowRefusal::ByReaders(1)))),
        (Write, 5..7, Read, Some((5, BorrowRefusal::ByWriter))),
        (Write, 0..4, Write, Some((3, BorrowRefusal::ByWriter))),
        (Write, 0..3, Write, None),
        (Write, 6..8, Write, None),
        (Write, 4..4, Write, None),
    ] {
        let memory = memory();
        let held = hold(&memory, first, pages.clone()).expect("idle");
        let refused = hold(&memory, second, 3..6).err().map(|busy| (busy.page, busy.held));
        assert_eq!(refused, met, "{first:?} {pages:?}, then {second:?} 3..6");
        drop(held);
        assert!(hold(&memory, Write, 0..8).is_ok(), "everything was given back");
    }
}

fn hold(
    memory: &HostMemory,
    access: Access,
    pages: Range<u32>,
) -> Result<Box<dyn fmt::Debug + '_>, PageBusy> {
    Ok(match access {
        Access::Read => Box::new(memory.read(0, pages)?),
        Access::Write => Box::new(memory.write(0, pages)?),
    })
}

#[test]
fn a_refused_run_holds_nothing() {
    let memory = memory();
    let reader = memory.read(0, 7..8).expect("idle");
    let busy = memory.write(0, 0..8).expect_err("page 7 is read");
    assert_eq!(busy.to_string(), "write page 7 of region 0, which 1 others read");
    assert!(memory.write(0, 0..7).is_ok());
    drop(reader);
    assert!(memory.write(0, 0..8).is_ok());
}

#[test]
fn a_refusal_names_the_page_that_is_being_written() {
    let memory = memory();
    let _writer = memory.write(0, 7..8).expect("idle");
    let busy = memory.read(0, 0..8).expect_err("page 7 is written");
    assert_eq!(busy.to_string(), "read page 7 of region 0, which is being written");
}

#[test]
#[should_panic(expected = "are not in a region of 8")]
fn a_page_outside_the_region_is_a_bug() {
    let _ = memory().read(0, 7..9);
}

#[test]
fn sizes_that_no_address_can_name_are_refused() {
    let shape = RegionShape { page_bytes: usize::MAX / 2, n_pages: 3 };
    assert!(matches!(HostMemory::new(&[shape]), Err(MemoryError::TooLarge)));
}

#[test]
fn no_regions_is_a_memory_too() {
    assert_eq!(HostMemory::new(&[]).expect("one byte can be mapped").bytes(), 0);
}

/// Writers fill overlapping runs with one number each, and no reader sees two numbers within one run of
/// pages.
#[test]
fn threads_never_see_half_a_write() {
    let memory = memory();
    std::thread::scope(|scope| {
        for writer in 1..=3u8 {
            let memory = &memory;
            scope.spawn(move || write_often(memory, writer));
        }
        for _ in 0..2 {
            scope.spawn(|| read_often(&memory));
        }
    });
    assert!(memory.write(0, 0..8).is_ok(), "every borrow was given back");
}

fn write_often(memory: &HostMemory, number: u8) {
    for round in 0..2_000u32 {
        let start = (round + u32::from(number)) % 6;
        if let Ok(mut run) = memory.write(0, start..start + 2) {
            run.fill(number);
        }
    }
}

fn read_often(memory: &HostMemory) {
    for round in 0..2_000u32 {
        if let Ok(page) = memory.read(0, round % 8..round % 8 + 1) {
            let first = page[0];
            assert!(page.iter().all(|byte| *byte == first), "a page changed while it was read");
        }
    }
}

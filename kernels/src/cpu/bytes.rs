//! Immutable bytes that several users share: a mapped file, or anonymous memory.

use std::fmt;
use std::fs::File;
use std::io;
use std::ops::{Deref, Range};
use std::path::Path;
use std::sync::Arc;

use memmap2::{Mmap, MmapMut};

/// A part of a read-only mapping. Cloning and slicing share the mapping. Dropping the last part unmaps it.
#[derive(Clone)]
pub struct SharedBytes {
    mapping: Arc<Mmap>,
    range: Range<usize>,
}

impl SharedBytes {
    /// Maps a whole file. Two processes that map the same file share its memory.
    ///
    /// The file must not change while it is mapped: a model folder is replaced, never rewritten. If the file
    /// is truncated, a read after the new end kills the process, as with any mapped file.
    pub fn map(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        // JUSTIFICATION: weights are gigabytes; reading them into memory would duplicate the page cache's
        // copy.
        // SAFETY: the mapping is read-only and private. The file does not change (see above).
        let mapping = unsafe { Mmap::map(&file)? };
        Ok(Self::whole(mapping))
    }

    /// Makes page-aligned anonymous memory, zero at first, which `fill` writes once.
    pub fn filled(len: usize, fill: impl FnOnce(&mut [u8])) -> io::Result<Self> {
        let mut mapping = MmapMut::map_anon(len.max(1))?;
        // Huge pages save page faults and TLB misses. An error is ignored: without them, this works more
        // slowly.
        #[cfg(target_os = "linux")]
        let _ = mapping.advise(memmap2::Advice::HugePage);
        fill(&mut mapping[..len]);
        Ok(Self::whole(mapping.make_read_only()?).slice(0..len))
    }

    /// Returns a part of these bytes, which shares the mapping.
    ///
    /// # Panics
    /// If the range is not within these bytes.
    pub fn slice(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len(), "{range:?} of {} bytes", self.len());
        let start = self.range.start + range.start;
        Self { mapping: Arc::clone(&self.mapping), range: start..start + range.len() }
    }

    fn whole(mapping: Mmap) -> Self {
        let range = 0..mapping.len();
        Self { mapping: Arc::new(mapping), range }
    }
}

impl Deref for SharedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.mapping[self.range.clone()]
    }
}

impl fmt::Debug for SharedBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedBytes({} bytes)", self.range.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_of_a_slice_is_where_it_should_be() {
        let bytes = SharedBytes::filled(10, |bytes| bytes.copy_from_slice(b"0123456789")).unwrap();
        assert_eq!(&*bytes.slice(2..8).slice(1..3), b"34");
        assert_eq!(&*SharedBytes::filled(0, |_| {}).unwrap(), b"");
    }
}

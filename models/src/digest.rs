//! Verifies a download by the digest in the hub's etag: the content's SHA-256, or its git object id.

use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256};

/// A digest of a file that is computed while the file arrives. If the etag is not a digest, the file is not
/// verified.
pub(crate) struct Digest {
    context: Option<Context>,
}

impl Digest {
    /// Begins a digest. A large file has its SHA-256 as etag, a small one its git object id: the SHA-1 of a
    /// header and the content.
    pub(crate) fn of(etag: &str, n_bytes: u64) -> Self {
        let is_hex = etag.bytes().all(|byte| byte.is_ascii_hexdigit());
        let context = match etag.len() {
            64 if is_hex => Some(Context::new(&SHA256)),
            40 if is_hex => {
                let mut context = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
                context.update(format!("blob {n_bytes}\0").as_bytes());
                Some(context)
            }
            _ => None,
        };
        Self { context }
    }

    pub(crate) fn update(&mut self, bytes: &[u8]) {
        if let Some(context) = &mut self.context {
            context.update(bytes);
        }
    }

    pub(crate) fn is(self, etag: &str) -> bool {
        self.context.is_none_or(|context| hex(context.finish().as_ref()) == etag.to_ascii_lowercase())
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is(etag: &str, content: &[u8]) -> bool {
        let mut digest = Digest::of(etag, content.len() as u64);
        content.chunks(2).for_each(|piece| digest.update(piece));
        digest.is(etag)
    }

    #[test]
    fn contents_are_what_their_etags_say() {
        let sha256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert!(is(sha256, b"abc") && !is(sha256, b"abd"));
        let git = "f2ba8f84ab5c1bce84a7b441cb1959cfc7093b7f";
        assert!(is(git, b"abc") && !is(git, b"ab"));
        assert!(is("something-else", b"abc"), "nothing to hold it to");
    }
}

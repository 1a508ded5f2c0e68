//! Hot path. Finds the `data:` lines of a body, wherever the network cuts it.

/// The longest line that is accepted, in bytes. The first event may repeat a whole prompt's token ids; no
/// model server sends longer lines.
const LINE_BYTES_MAX: usize = 8 << 20;

/// Splits a body into lines. A line within one read is passed on without a copy; a line that is cut between
/// two reads is copied.
#[derive(Debug, Default)]
pub struct Lines {
    cut: Vec<u8>,
}

/// The error of a line that is longer than `LINE_BYTES_MAX`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LineTooLong;

impl Lines {
    /// Calls `on_data` with the payload of each `data:` line. Every such line is an event: the measured
    /// servers split no event over several lines.
    pub fn take(&mut self, mut body: &[u8], on_data: &mut dyn FnMut(&[u8])) -> Result<(), LineTooLong> {
        while let Some(end) = memchr::memchr(b'\n', body) {
            let (line, rest) = (&body[..end], &body[end + 1..]);
            if self.cut.is_empty() {
                hand_on(line, on_data);
            } else {
                self.cut.extend_from_slice(line);
                hand_on(&self.cut, on_data);
                self.cut.clear();
            }
            body = rest;
        }
        self.cut.extend_from_slice(body);
        if self.cut.len() > LINE_BYTES_MAX { Err(LineTooLong) } else { Ok(()) }
    }
}

fn hand_on(line: &[u8], on_data: &mut dyn FnMut(&[u8])) {
    if let Some(payload) = line.strip_prefix(b"data:") {
        let payload = payload.strip_suffix(b"\r").unwrap_or(payload);
        on_data(payload.strip_prefix(b" ").unwrap_or(payload));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BODY: &[u8] =
        b": hello\n\nevent: x\ndata: one\n\ndata:two\r\n\r\nid: 4\ndata:  three \n\ndata: [DONE]\n\n";

    #[test]
    fn data_lines_come_out_wherever_the_body_is_cut() {
        for cut in 0..BODY.len() {
            let (mut lines, mut seen) = (Lines::default(), Vec::new());
            for piece in [&BODY[..cut], &BODY[cut..]] {
                let mut on_data = |data: &[u8]| seen.push(String::from_utf8_lossy(data).into_owned());
                lines.take(piece, &mut on_data).expect("short lines");
            }
            assert_eq!(seen, ["one", "two", " three ", "[DONE]"], "cut at {cut}");
        }
    }

    #[test]
    fn a_line_without_end_is_refused() {
        let mut lines = Lines::default();
        let piece = vec![b'x'; 1 << 20];
        let verdicts: Vec<_> = (0..9).map(|_| lines.take(&piece, &mut |_| ())).collect();
        assert_eq!(verdicts.last(), Some(&Err(LineTooLong)));
        assert!(verdicts[..8].iter().all(Result::is_ok));
    }
}

//! Reads the register use and the spills of each kernel from the compiler's log.

/// The resources of one kernel, as ptxas printed them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Usage {
    pub kernel: String,
    pub registers: u32,
    /// Bytes written to memory because the registers were not enough.
    pub spill_bytes: u32,
}

/// Reads a log of `--ptxas-options=-v`. The result is sorted by name.
pub fn usages(log: &str) -> Vec<Usage> {
    let mut found = Vec::new();
    let mut kernel = None;
    let mut spill_bytes = 0;
    for line in log.lines() {
        if let Some(rest) = line.split("Compiling entry function '").nth(1) {
            kernel = rest.split('\'').next().map(str::to_owned);
        } else if let Some(number) = number_before(line, " bytes spill stores") {
            spill_bytes = number;
        } else if let Some(registers) = number_before(line, " registers") {
            found.extend(kernel.take().map(|kernel| Usage { kernel, registers, spill_bytes }));
            spill_bytes = 0;
        }
    }
    found.sort_by(|a, b| a.kernel.cmp(&b.kernel));
    found
}

fn number_before(line: &str, words: &str) -> Option<u32> {
    line.split(words).next().filter(|before| before.len() < line.len())?.rsplit(' ').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_is_read() {
        let log = "ptxas info    : Compiling entry function 'one' for 'sm_90a'\n\
                   ptxas info    : Function properties for one\n\
                   \u{20}   8 bytes stack frame, 16 bytes spill stores, 12 bytes spill loads\n\
                   ptxas info    : Used 255 registers, used 1 barriers\n";
        let expected = Usage { kernel: "one".to_owned(), registers: 255, spill_bytes: 16 };
        assert_eq!(usages(log), [expected]);
    }
}

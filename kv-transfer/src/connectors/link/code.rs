//! Errors on the wire: a code with a fixed meaning, and a text for humans.

use std::io;

use types::in_full;

use crate::error::TransferError;

const UNKNOWN_LANDING: u8 = 1;
const WRONG_GRANT: u8 = 2;
const WRONG_EPOCH: u8 = 3;
const ALREADY_OPENED: u8 = 4;
const EXPIRED: u8 = 5;
const MISMATCH: u8 = 6;
const CANCELLED: u8 = 7;
const CORRUPTED: u8 = 8;
const FENCE_BROKEN: u8 = 9;
const CLOSED: u8 = 10;
const CONNECTION_LOST: u8 = 11;
const OTHER: u8 = 255;

pub(crate) fn encode(error: &TransferError) -> (u8, String) {
    use TransferError as E;
    let code = match error {
        E::UnknownLanding => UNKNOWN_LANDING,
        E::WrongGrant => WRONG_GRANT,
        E::WrongEpoch => WRONG_EPOCH,
        E::AlreadyOpened => ALREADY_OPENED,
        E::Expired => EXPIRED,
        E::Mismatch(_) | E::Layout(_) | E::Fingerprint(_) => MISMATCH,
        E::Cancelled | E::Unfinished => CANCELLED,
        E::Corrupted { .. } => CORRUPTED,
        E::FenceBroken => FENCE_BROKEN,
        E::Closed => CLOSED,
        E::ConnectionLost { .. } => CONNECTION_LOST,
        _ => OTHER,
    };
    (code, detail(error))
}

fn detail(error: &TransferError) -> String {
    match error {
        TransferError::Mismatch(why) => why.clone(),
        TransferError::ConnectionLost { source } => in_full(&**source),
        TransferError::Corrupted { pages } => pages.to_string(),
        _ => in_full(error),
    }
}

pub(crate) fn decode(code: u8, detail: String) -> TransferError {
    use TransferError as E;
    match code {
        UNKNOWN_LANDING => E::UnknownLanding,
        WRONG_GRANT => E::WrongGrant,
        WRONG_EPOCH => E::WrongEpoch,
        ALREADY_OPENED => E::AlreadyOpened,
        EXPIRED => E::Expired,
        MISMATCH => E::Mismatch(detail),
        CANCELLED => E::Cancelled,
        CORRUPTED => E::Corrupted { pages: detail.parse().unwrap_or(0) },
        FENCE_BROKEN => E::FenceBroken,
        CLOSED => E::Closed,
        CONNECTION_LOST => E::lost(io::Error::other(detail)),
        _ => E::Peer(detail),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_cross_the_wire() {
        use TransferError as E;
        for error in [
            E::UnknownLanding,
            E::WrongGrant,
            E::WrongEpoch,
            E::AlreadyOpened,
            E::Expired,
            E::Mismatch("why".to_owned()),
            E::Cancelled,
            E::Corrupted { pages: 3 },
            E::FenceBroken,
            E::Closed,
            E::lost_because("why"),
        ] {
            let (code, detail) = encode(&error);
            assert_eq!(decode(code, detail).to_string(), error.to_string());
        }
    }

    #[test]
    fn what_has_no_number_keeps_its_words() {
        let (code, detail) = encode(&TransferError::Memory("page 3".to_owned()));
        assert_eq!(
            decode(code, detail).to_string(),
            "the peer failed: KV memory is in use where it must not be: page 3"
        );
    }
}

//! gRPC messages: decoded, converted, and encoded again.

use std::fmt::Debug;

use prost::Message;
use proto::{ConvertError, v1};
use types::{
    BlockEvent, ComputedPrompt, Destination, Fingerprint, KvLayout, Landing, ModelInfo, NodeInfo, NodeLoad,
    Refusal, Sampling, Step, StopRules,
};

/// Parses a landing from a router. The values that are accepted must be valid.
pub fn landing(bytes: &[u8]) {
    let Some(landing) = again::<v1::Landing, Landing>(bytes, |landing| landing.into()) else { return };
    let wanted = landing.wanted_blocks();
    assert!(wanted.start <= wanted.end, "{landing:?}");
    assert!(landing.tables.iter().all(|table| table.len() >= wanted.end as usize), "{landing:?}");
    let n_layers: usize = landing.layout.groups.iter().map(|group| group.layers.len()).sum();
    assert_eq!(landing.wanted_pages(), wanted.len() * n_layers);
    if let Some(last) = wanted.clone().last() {
        assert!((1..=landing.layout.block_tokens).contains(&landing.valid_tokens(last)), "{landing:?}");
    }
}

/// Parses a message of another kind, which the first byte chooses.
pub fn proto(bytes: &[u8]) {
    let Some((which, bytes)) = bytes.split_first() else { return };
    match which % 13 {
        0 => prompt(bytes),
        1 => drop(again::<v1::NodeInfo, NodeInfo>(bytes, |node| node.into())),
        2 => drop(again::<v1::NodeLoad, NodeLoad>(bytes, |load| (*load).into())),
        3 => drop(again::<v1::Step, Step>(bytes, |step| step.into())),
        4 => drop(again::<v1::Prefilled, ComputedPrompt>(bytes, |prefilled| prefilled.into())),
        5 => drop(again::<v1::ModelInfo, ModelInfo>(bytes, |model| model.into())),
        6 => drop(again::<v1::KvLayout, KvLayout>(bytes, |layout| layout.into())),
        7 => drop(again::<v1::Sampling, Sampling>(bytes, |sampling| sampling.into())),
        8 => block_events(bytes),
        9 => drop(v1::Refusal::decode(bytes).map(Refusal::from)),
        10 => drop(v1::StopRules::decode(bytes).map(StopRules::from)),
        11 => drop(v1::Fingerprint::decode(bytes).map(Fingerprint::from)),
        _ => destination(bytes),
    }
}

/// Returns the parsed value, if there is one. Checks that it is equal after it is encoded and parsed again.
fn again<W, T>(bytes: &[u8], say: impl Fn(&T) -> W) -> Option<T>
where
    W: Message + Default,
    T: TryFrom<W, Error = ConvertError> + Debug,
{
    let understood = T::try_from(W::decode(bytes).ok()?).ok()?;
    let said = say(&understood).encode_to_vec();
    let repeated = T::try_from(W::decode(&*said).expect("our own words")).expect("it was understood");
    assert_eq!(printed(&understood), printed(&repeated));
    Some(understood)
}

/// Prints a value, to compare it: NaN is not equal to itself. The sign of a zero is left out, because protobuf does not
/// send zeros.
fn printed(value: &impl Debug) -> String {
    let text = format!("{value:?}");
    let words = text.split_inclusive([' ', ',', ')', ']', '}']);
    words
        .map(
            |word| if word.trim_end_matches([' ', ',', ')', ']', '}']) == "-0.0" { &word[1..] } else { word },
        )
        .collect()
}

fn prompt(bytes: &[u8]) {
    let now = tokio::time::Instant::now().into_std();
    let Ok(wire) = v1::Prompt::decode(bytes) else { return };
    let Ok(prompt) = proto::prompt_from_wire(wire, now) else { return };
    assert!(!prompt.tokens.is_empty() && prompt.n_generated <= prompt.tokens.len());
    let said = proto::prompt_to_wire(&prompt, now);
    let repeated = proto::prompt_from_wire(said, now).expect("it was understood");
    assert_eq!(
        (&prompt.id, &prompt.tokens, prompt.n_generated),
        (&repeated.id, &repeated.tokens, repeated.n_generated)
    );
}

fn block_events(bytes: &[u8]) {
    let Ok(wire) = v1::BlockEvents::decode(bytes) else { return };
    let Ok((number, event)) = <(u64, BlockEvent)>::try_from(wire) else { return };
    let repeated = <(u64, BlockEvent)>::try_from(v1::BlockEvents::new(number, &event));
    assert_eq!(repeated.expect("it was understood"), (number, event));
}

fn destination(bytes: &[u8]) {
    let wire = v1::PrefillRequest::decode(bytes).ok().and_then(|request| request.destination);
    let Some(Ok(destination)) = wire.map(Destination::try_from) else { return };
    let said = v1::prefill_request::Destination::from(&destination);
    assert_eq!(Destination::try_from(said).expect("it was understood"), destination);
}

//! Where schemas are in a schema.

/// The form in which a keyword of JSON Schema holds schemas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Parts {
    Map,
    List,
    One,
}

impl Parts {
    /// Returns the form under this keyword; `None` if no schemas are under it.
    pub(crate) fn under(keyword: &str) -> Option<Self> {
        match keyword {
            "properties" | "patternProperties" | "$defs" | "definitions" => Some(Self::Map),
            "allOf" | "anyOf" | "oneOf" | "prefixItems" => Some(Self::List),
            "items" | "additionalItems" | "additionalProperties" => Some(Self::One),
            _ => None,
        }
    }
}

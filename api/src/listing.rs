//! Pages of things that are listed newest first by their id, which is most lists.

use std::{fmt::Display, str::FromStr};

use domain::account::Tenant;

use crate::{
    Shared,
    cursor::{self, Cursor},
    envelope::Page,
    error::Problem,
    query,
};

/// What a client asks of a list.
pub(crate) struct Wanted {
    filter: String,
    /// Items of a page.
    pub(crate) limit: usize,
    cursor: Option<String>,
}

impl Wanted {
    /// A page of what `tenant` may see, under these filters.
    pub(crate) fn new(
        tenant: Tenant,
        filters: &[&(dyn std::fmt::Debug + Sync)],
        limit: Option<u32>,
        cursor: Option<String>,
    ) -> Self {
        let all: Vec<&(dyn std::fmt::Debug + Sync)> = [&tenant as &(dyn std::fmt::Debug + Sync)]
            .into_iter()
            .chain(filters.iter().copied())
            .collect();
        Self { filter: cursor::filter(&all), limit: limit.unwrap_or(query::LIMIT) as usize, cursor }
    }

    /// The last id of the page before.
    pub(crate) fn after<I: FromStr>(&self, shared: &Shared) -> Result<Option<I>, Problem> {
        let key = &shared.settings.signing_key;
        let after = cursor::read(key, self.cursor.as_deref(), &self.filter)?;
        Ok(after.and_then(|after| after.id.parse().ok()))
    }

    /// Dresses rows that begin after the cursor; one more than the limit tells that there are more.
    pub(crate) fn page<T, B>(
        &self,
        shared: &Shared,
        rows: impl IntoIterator<Item = T>,
        id: impl Fn(&T) -> String,
        dress: impl Fn(&T) -> B,
    ) -> Page<B>
    where
        B: poem_openapi::types::ParseFromJSON
            + poem_openapi::types::ToJSON
            + poem_openapi::types::Type
            + Send
            + Sync,
    {
        let mut rows: Vec<T> = rows.into_iter().take(self.limit + 1).collect();
        let has_more = rows.len() > self.limit;
        rows.truncate(self.limit);
        let last = rows.last().filter(|_| has_more).map(id);
        let key = &shared.settings.signing_key;
        let write = |id| cursor::write(key, Cursor { key: String::new(), id }, &self.filter);
        Page { items: rows.iter().map(dress).collect(), has_more, next_cursor: last.map(write) }
    }
}

/// Whether an id comes after the cursor of a list that shows the newest first.
pub(crate) fn is_older<I: Ord + Display>(id: &I, after: Option<&I>) -> bool {
    after.is_none_or(|after| id < after)
}
